"""A learning rate that is halved whenever the training loss has stopped falling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from data.aliases import Duration
from data.system.log import log
from recipes.training.callback import Callback
from recipes.training.clock import Clock
from recipes.training.run import Run
from recipes.training.schedules import constant


@dataclass
class PlateauRule:
    """Detects plateaus of a loss: several windows of batches in a row without a lower mean loss.

    Attributes:
        window: number of batches per mean.
        patience: number of windows without a lower mean that make a plateau.
        threshold: a mean counts as lower if it is below the best one by at least this share of it.
        limit: largest number of plateaus.
        seen, total: batches of the current window so far, and the sum of their losses.
        best: lowest mean so far.
        waited: number of windows since the best mean.
        plateaus: number of plateaus so far.
    """

    window: int
    patience: int
    threshold: float
    limit: int
    seen: int = 0
    total: float = 0.0
    best: float = math.inf
    waited: int = 0
    plateaus: int = 0

    def add(self, loss: float) -> bool:
        """Add the loss of one batch, unless it is not finite. Returns whether a plateau is complete with it."""
        if self.plateaus >= self.limit or not math.isfinite(loss):
            return False
        self.seen += 1
        self.total += loss
        if self.seen < self.window:
            return False
        mean, self.seen, self.total = self.total / self.seen, 0, 0.0
        if mean < self.best - self.threshold * abs(self.best) or math.isinf(self.best):
            self.best, self.waited = mean, 0
            return False
        self.waited += 1
        if self.waited < self.patience:
            return False
        self.waited = 0
        self.plateaus += 1
        return True


class Plateau(Callback):
    """A linear warm-up, then the peak rate, halved each time the training loss appears to plateau.

    For DALL-E (Ramesh et al. 2021, appendix B.2) this was done by hand, five times. Here a plateau is a number of
    windows of batches without a lower mean loss. The loss is averaged over all ranks, so that all ranks agree.
    """

    def __init__(
        self,
        *,
        warmup: Duration = "0ba",
        window: int = 1000,
        patience: int = 5,
        threshold: float = 0.001,
        factor: float = 0.5,
        limit: int = 5,
    ) -> None:
        """
        Args:
            warmup: length of the warm-up, in which plateaus are not detected.
            window: number of batches per mean loss.
            patience: number of windows without a lower mean that make a plateau.
            threshold: share by which a mean must be below the lowest one so far to count as lower.
            factor: factor of the learning rate at each plateau.
            limit: largest number of plateaus.

        Raises:
            ValueError: numbers out of range.
        """
        if window < 1 or patience < 1 or limit < 0:
            raise ValueError(f"plateau: window {window}, patience {patience}, limit {limit}: give 1, 1, 0 or more")
        if not 0 < factor < 1 or not 0 <= threshold < 1:
            raise ValueError(f"plateau: factor {factor}, threshold {threshold}: give shares between 0 and 1")
        self.warm = constant(warmup=warmup)
        self.factor = factor
        self.rule = PlateauRule(window, patience, threshold, limit)

    def __call__(self, clock: Clock) -> float:
        """The learning rate as a share of the peak; see `recipes.training.schedules`."""
        return self.warm(clock) * self.factor**self.rule.plateaus

    def step_end(self, run: Run) -> None:
        if self.warm(run.clock) < 1 or run.loss is None:
            return
        if self.rule.add(run.loss):
            share = self.factor**self.rule.plateaus
            log.info(f"plateau: number {self.rule.plateaus} at batch {run.clock.batch}, rate x {share:g}")
        run.log({"schedule/plateaus": self.rule.plateaus})

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.rule, name) for name in ("seen", "total", "best", "waited", "plateaus")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule = replace(self.rule, **state)
