"""Random numbers go on after a resume where they stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
from composer import Callback, Logger, State
from composer.utils import dist, reproducibility

from recipes.engines.checkpoints.lazy import copied
from recipes.engines.generators import check_position, set_apart
from recipes.training.ranks import rank, world_size


class Generators(Callback):
    """Restores the random number generators of every rank at the first batch after a resume.

    Composer saves them too, but restores them while it skips the batches that were seen already. It skips none if the
    data set finds its own position, as StreamingDataset does; noise and timesteps would then be drawn from new seeds.
    """

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None  # of this rank
        self.resumes = False  # on all ranks, also on those that the checkpoint has no state of

    def state_dict(self) -> dict[str, Any]:
        # Of all ranks. A run that ends before its first batch, as one that was complete, passes on what it got.
        states = reproducibility.get_rng_state() if self.saved is None else dist.all_gather_object(self.saved)
        return {"generators": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumes = True
        saved = state["generators"][rank()] if rank() < len(state["generators"]) else None
        # Where a sharded checkpoint has no state of this rank, there is an empty form; see `LoadPlanner`.
        self.saved = copied(saved) if saved is not None and isinstance(saved["numpy"][1], np.ndarray) else None
        if self.saved is not None:
            check_position(self.saved)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.saved is not None:
            reproducibility.load_rng_state([self.saved] * world_size())
            self.saved = None
        if self.resumes:
            set_apart()
            self.resumes = False
