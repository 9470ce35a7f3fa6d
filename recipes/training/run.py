"""What an engine tells levers and callbacks about the run that they take part in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from recipes.models.task import Task
from recipes.training.clock import Clock

Precision = Literal["fp32", "amp_bf16", "amp_fp16"]


class Run(ABC):
    """A training run, as every engine shows it.

    Attributes:
        task: what is trained, without any wrapper.
        device: of this rank.
        precision: of the forward and backward pass.
        batch: from `batch_start` on this rank's batch; from `before_forward` to `after_backward` the microbatch, on the
            device and transformed; in validation likewise. By the names of its tensors.
        outputs: in validation, what the task's `evaluate` returned for `batch`.
        passes: microbatches (and backward passes) of the batch, from `before_passes` on.
        pass_number: of the microbatch at hand, from 0 to `passes` - 1.
        loss: total loss of the last batch, averaged over all ranks; None before the first batch.
        eval_label: of the validation set at hand.
        eval_figures: at `eval_end`, means over the validation set by name.
    """

    task: Task
    device: torch.device
    precision: Precision
    batch: dict[str, Tensor]
    outputs: dict[str, Tensor]
    passes: int
    pass_number: int
    loss: float | None
    eval_label: str
    eval_figures: dict[str, float]

    @property
    @abstractmethod
    def clock(self) -> Clock:
        """Where the run is now."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """What is called to train: from `begin` on possibly DistributedDataParallel around (a wrapper of) the task."""

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def last_pass(self) -> bool:
        """Whether the microbatch at hand is the batch's last one."""
        return self.pass_number + 1 == self.passes

    @abstractmethod
    def autocast(self) -> AbstractContextManager:
        """The context in which the task is called."""

    @abstractmethod
    def gradient_scale(self) -> float:
        """What the loss is multiplied by before the backward pass under amp_fp16; 1 otherwise."""

    @abstractmethod
    def new_parameters(self) -> AbstractContextManager:
        """A context in which the task's parameters are replaced; afterwards the optimizer has the new ones."""

    @abstractmethod
    def set_microbatch(self, samples: int) -> None:
        """From the next batch on, and in validation, a device takes at most so many samples at once."""

    @abstractmethod
    def log(self, figures: Mapping[str, float]) -> None:
        """Send figures to the loggers, at this batch."""

    @abstractmethod
    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Send what was decided at the start of the run to the loggers."""

    @abstractmethod
    def log_images(self, name: str, images: np.ndarray) -> None:
        """Send images (N, H, W, 3) uint8 to the loggers, at this batch."""

    def skip_update(self) -> None:
        """Leave out this batch's update: without gradients the optimizer changes nothing. Every rank must call it."""
        self.optimizer.zero_grad(set_to_none=True)
