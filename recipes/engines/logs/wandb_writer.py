"""Writes to a run of W&B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class WandBWriter:
    """Writes figures, images and settings to a run that may have those of earlier starts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """
        Args:
            settings: arguments of `wandb.init`.
        """
        import wandb  # it takes seconds, and few runs need it

        self._image = wandb.Image
        self._run = wandb.init(**settings)

    def figures(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures of a batch. The first ones stay where batches are trained again after a kill: W&B would ignore
        others, with a warning at each call."""
        if step >= self._run.step:
            self._run.log({name: float(value) for name, value in figures.items()}, step=step)

    def images(self, name: str, images: np.ndarray, step: int) -> None:
        """Write images (N, H, W, 3) uint8 of a batch; see `figures`."""
        if step >= self._run.step:
            self._run.log({name: [self._image(image) for image in images]}, step=step)

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Write settings. They may change when a run goes on, the names of machines among them."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def close(self, status: str) -> None:
        """Write what waits. A run that is not FINISHED has failed, for W&B."""
        self._run.finish(exit_code=int(status != "FINISHED"))
