"""Random numbers go on after a resume where they stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
from composer import Callback, Logger, State
from composer.utils import dist, reproducibility

from recipes.engines.lazy import copied
from recipes.training.ranks import rank


class Generators(Callback):
    """Restores the random number generators of every rank at the first batch after a resume.

    Composer saves them too, but restores them while it skips the batches that were seen already. It skips none if the
    data set finds its own position, as StreamingDataset does; noise and timesteps would then be drawn from new seeds.
    """

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        # Of all ranks. A run that ends before its first batch, as one that was complete, passes on what each rank got:
        # of a sharded checkpoint each has read its own state only.
        if self.saved is None or rank() >= len(self.saved):
            return {"generators": reproducibility.get_rng_state()}  # which gathers, too
        return {"generators": dist.all_gather_object(self.saved[rank()])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Of ranks that a sharded checkpoint has no state of there is an empty form; see `LoadPlanner`.
        self.saved = copied([saved for saved in state["generators"] if isinstance(saved["numpy"][1], np.ndarray)])

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.saved is not None:
            reproducibility.load_rng_state(self.saved)
            self.saved = None
