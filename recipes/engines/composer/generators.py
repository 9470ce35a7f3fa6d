"""Random numbers go on after a resume where they stopped."""

from __future__ import annotations

from typing import Any

from composer import Callback, Logger, State
from composer.utils import reproducibility


class Generators(Callback):
    """Restores the random number generators of every rank at the first batch after a resume.

    Composer saves them too, but restores them while it skips the batches that were seen already. It skips none if the
    data set finds its own position, as StreamingDataset does; noise and timesteps would then be drawn from new seeds.
    """

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"generators": reproducibility.get_rng_state()}  # of all ranks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state["generators"]

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.saved is not None:
            reproducibility.load_rng_state(self.saved)
            self.saved = None
