"""One line every few seconds: how far a run is, how fast, and when it will be done."""

from __future__ import annotations

import time

from composer import Callback, Logger, State
from composer.utils import dist


class Progress(Callback):
    """Prints share done, batches, loss, samples/s and the time that is left, also where there is no terminal."""

    def __init__(self, run_name: str, output: str, *, seconds: float = 10.0) -> None:
        """
        Args:
            seconds: least time between two lines.
        """
        self.run_name = run_name
        self.output = output
        self.seconds = seconds
        self.began = self.last = 0.0
        self.began_share = 0.0
        self.last_samples = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        self.began = self.last = time.monotonic()
        self.began_share = _share(state)
        self.last_samples = state.timestamp.sample.value

    def batch_end(self, state: State, logger: Logger) -> None:
        now = time.monotonic()
        share = _share(state)
        if dist.get_global_rank() != 0 or (now - self.last < self.seconds and share < 1):
            return
        samples = state.timestamp.sample.value
        rate = (samples - self.last_samples) / (now - self.last)
        left = (now - self.began) * (1 - share) / (share - self.began_share) if share > self.began_share else 0.0
        loss = state.total_loss_dict.get("loss/train/total", float("nan"))
        print(
            f"{self.run_name}: {share:4.0%}, batch {state.timestamp.batch.value}, loss {float(loss):.4f}, "
            f"{rate:.0f} samples/s, {clock(left)} left",
            flush=True,
        )
        self.last, self.last_samples = now, samples

    def eval_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            # Only this set's: others may have nothing yet, and computing theirs would wait for the other ranks.
            label = state.dataloader_label
            figures = ", ".join(f"{k} {float(metric.compute()):.4f}" for k, metric in state.eval_metrics[label].items())
            print(f"{self.run_name}: {label} at batch {state.timestamp.batch.value}: {figures}", flush=True)

    def fit_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            spent = clock(time.monotonic() - self.began)
            print(f"{self.run_name}: {state.timestamp.batch.value} batches in {spent}; see {self.output}", flush=True)


def _share(state: State) -> float:
    elapsed = state.get_elapsed_duration()
    return 0.0 if elapsed is None else min(1.0, elapsed.value)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
