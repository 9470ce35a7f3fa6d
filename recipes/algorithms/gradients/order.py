"""The order in which algorithms work on a finished gradient, whatever order a recipe names them in."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from composer.core import Algorithm, Event


class GradientStage(IntEnum):
    """What an algorithm does at AFTER_TRAIN_BATCH, as its attribute `gradient_stage`; ascending."""

    UNSCALE = 0
    AVERAGE = 1
    CLIP = 2


def in_gradient_order(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """A pass for Composer's engine: unscale, average, clip; then those that say nothing, in the order they had.

    Composer itself runs the algorithms of an `after` event in the reverse of their order.
    """
    if event != Event.AFTER_TRAIN_BATCH:
        return algorithms
    return sorted(algorithms, key=lambda a: getattr(a, "gradient_stage", len(GradientStage)))
