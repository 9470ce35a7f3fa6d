"""One line every few seconds: how far a run is, how fast it is, and how long it will take."""

from __future__ import annotations

import time

from data.ranges import check_least
from data.system.log import log
from recipes.training.callback import Callback
from recipes.training.run import Run


class Progress(Callback):
    """Prints progress in percent, the batch, the loss, samples/s and the time left, with or without a terminal."""

    def __init__(self, run_name: str, output: str, *, seconds: float = 10.0) -> None:
        """
        Args:
            seconds: shortest time between two lines.
        """
        check_least("progress", 0, seconds=seconds)
        self.run_name = run_name
        self.output = output
        self.seconds = seconds
        self.began = self.last = 0.0
        self.began_share = 0.0
        self.last_samples = 0

    def begin(self, run: Run) -> None:
        self.began = self.last = time.monotonic()
        self.began_share = run.clock.share
        self.last_samples = run.clock.sample

    def step_end(self, run: Run) -> None:
        now = time.monotonic()
        clock = run.clock
        if now - self.last < self.seconds and clock.share < 1:
            return
        rate = (clock.sample - self.last_samples) / (now - self.last)
        done = clock.share - self.began_share
        # A run of epochs whose length is not known gets on at their ends only.
        left = f", {format_seconds((now - self.began) * (1 - clock.share) / done)} left" if done > 0 else ""
        loss = float("nan") if run.loss is None else run.loss
        log.info(
            f"{self.run_name}: {clock.share:4.0%}, batch {clock.batch}, loss {loss:.4f}, "
            f"{rate:.0f} samples/s{left}"
        )
        self.last, self.last_samples = now, clock.sample

    def eval_end(self, run: Run) -> None:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in run.eval_figures.items())
        log.info(f"{self.run_name}: {run.eval_label} at batch {run.clock.batch}: {figures}")

    def end(self, run: Run) -> None:
        spent = format_seconds(time.monotonic() - self.began)
        log.info(f"{self.run_name}: {run.clock.batch} batches in {spent}; see {self.output}")


def format_seconds(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
