"""Which backward pass of a batch is the last one; Composer does not say."""

from __future__ import annotations

import math

from composer.core import State


def passes_of_batch(state: State) -> int:
    """Microbatches that the batch of BEFORE_TRAIN_BATCH is divided into."""
    samples = len(next(iter(state.batch.values())))
    return math.ceil(samples / state.device_train_microbatch_size)
