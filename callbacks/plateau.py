"""A learning rate that is halved whenever the training loss has stopped falling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from composer import Callback, Logger, State
from composer.optim import ConstantWithWarmupScheduler
from composer.utils import dist

from data.aliases import Duration  # noqa: F401 - read from the annotations below


@dataclass
class PlateauRule:
    """When a falling loss has come to rest: means over windows of batches, none of which was better for a while.

    Attributes:
        window: batches that a mean is taken over.
        patience: windows without a better mean that make a plateau.
        threshold: share of the best mean by which a better one is lower.
        limit: plateaus that count.
        seen, total: batches of the window so far, and the sum of their losses.
        best: lowest mean.
        waited: windows since it got lower.
        plateaus: how many there were.
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
        """Take in the loss of a batch; whether a plateau ends with it. What is not finite is left out."""
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

    DALL-E (Ramesh et al. 2021, appendix B.2) did this by hand, five times. Here a plateau is a number of windows of
    batches without a lower mean loss. The loss is Composer's mean over all ranks, so that they agree.
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
            warmup: length of the warm-up, in which no plateau is looked for.
            window: batches whose mean loss is compared.
            patience: windows without a lower mean that make a plateau.
            threshold: share by which a mean must lie below the lowest so far to count as lower.
            factor: what the rate is multiplied by at a plateau.
            limit: how often, at most.

        Raises:
            ValueError: numbers out of range.
        """
        if window < 1 or patience < 1 or limit < 0:
            raise ValueError(f"plateau: window {window}, patience {patience}, limit {limit}: give 1, 1, 0 or more")
        if not 0 < factor < 1 or not 0 <= threshold < 1:
            raise ValueError(f"plateau: factor {factor}, threshold {threshold}: give shares between 0 and 1")
        self.warm = ConstantWithWarmupScheduler(t_warmup=warmup)
        self.factor = factor
        self.rule = PlateauRule(window, patience, threshold, limit)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """The learning rate as a share of the peak: what Composer asks of a schedule."""
        return self.warm(state, ssr) * self.factor**self.rule.plateaus

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.warm(state) < 1 or "loss/train/total" not in state.total_loss_dict:
            return
        if self.rule.add(state.total_loss_dict["loss/train/total"]) and dist.get_global_rank() == 0:
            share = self.factor**self.rule.plateaus
            print(f"plateau: number {self.rule.plateaus} at batch {state.timestamp.batch.value}, rate x {share:g}")
        logger.log_metrics({"schedule/plateaus": self.rule.plateaus})

    def state_dict(self) -> dict[str, Any]:
        rule = self.rule
        return {
            "seen": rule.seen,
            "total": rule.total,
            "best": rule.best,
            "waited": rule.waited,
            "plateaus": rule.plateaus,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self.rule, name, state[name])
