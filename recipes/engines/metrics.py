"""How both engines average what a task's `evaluate` returns."""

from __future__ import annotations

from torchmetrics import MeanMetric


class MeanOf(MeanMetric):
    """The mean of one of the figures of `evaluate`, over all samples of a validation set on all ranks."""

    def __init__(self, figure: str) -> None:
        """
        Args:
            figure: name of the figure.
        """
        super().__init__()
        self.figure = figure
