"""Convolution algorithms chosen by measurement."""

from __future__ import annotations

import torch
from torch import nn

from data.system.log import log
from recipes.models.dvae.network import Conv
from recipes.training.lever import Lever
from recipes.training.run import Run

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, Conv)


class CudnnBenchmark(Lever):
    """Lets cuDNN time its algorithms for each new shape of a convolution, and use the fastest.

    For batches of one shape, as those of precomputed latents. Algorithms add in different orders, so that two runs of a
    recipe may differ in rounding.
    """

    def __init__(self, task: nn.Module) -> None:
        """
        Args:
            task: the model.
        """
        self.task = task

    def change_modules(self, run: Run) -> None:
        count = sum(isinstance(module, CONVOLUTIONS) for module in self.task.modules())
        if not count:
            raise ValueError("cudnn_benchmark: the model has no convolution; remove the lever")
        if run.on_gpu:
            torch.backends.cudnn.benchmark = True
            log.info(f"cudnn_benchmark: {count} convolutions")
        else:
            log.info("cudnn_benchmark: not used, it is for GPUs")
        run.log_settings({"cudnn_benchmark": run.on_gpu})
