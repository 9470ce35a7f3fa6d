"""The run as levers and callbacks see it: what every engine must provide."""

from __future__ import annotations

import math
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


def check_figures(figures: Mapping[str, float]) -> Mapping[str, float]:
    """The figures of `Run.log`, if loggers can write them. They are not computed here: only the first rank writes.

    Raises:
        ValueError: a value is no single number.
    """
    if not isinstance(figures, Mapping):
        raise ValueError(f"run.log: got an instance of {type(figures).__name__}; give a dict of numbers by name")
    for name, value in figures.items():
        if not isinstance(name, str):
            raise ValueError(f"run.log: the name {name!r} is an instance of {type(name).__name__}; give texts")
        many = isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) != 1
        if many or not hasattr(type(value), "__float__"):
            what = f"of shape {tuple(value.shape)}" if many else f"an instance of {type(value).__name__}"
            raise ValueError(f"run.log: the figure {name!r} is {what}; give one number per name")
    return figures


def check_images(name: str, images: np.ndarray) -> np.ndarray:
    """The images of `Run.log_images`, if loggers can write them.

    Raises:
        ValueError: they have another shape or dtype, or there are none.
    """
    shape, dtype = getattr(images, "shape", None), str(getattr(images, "dtype", "")).removeprefix("torch.")
    if shape is None or len(shape) != 4 or shape[-1] != 3 or not len(images) or dtype != "uint8":
        what = f"an instance of {type(images).__name__}" if shape is None else f"of shape {tuple(shape)} and {dtype}"
        raise ValueError(f"run.log_images: {name!r} is {what}; give (N, H, W, 3) of uint8, at least one")
    return images


class Run(ABC):
    """A training run, independently of the engine.

    Attributes:
        task: the model, without wrappers.
        module: what is called to train. From `begin` on it may be DistributedDataParallel around the task.
        optimizer: of the task.
        clock: the current position.
        device: of this rank.
        precision: of forward and backward passes.
        batch: tensors by name. From `batch_start` on, the batch of this rank; from `before_forward` to `after_backward`
            and in validation, the current microbatch, transformed and on the device.
        outputs: in validation, what `Task.evaluate` returned for `batch`.
        passes: number of microbatches (and backward passes) of the current batch; set before `before_passes`.
        pass_number: index of the current microbatch, from 0 to `passes` - 1.
        loss: total loss of the last batch, averaged over all ranks; None before the first batch.
        eval_label: label of the current validation set.
        eval_figures: at `eval_end`, name -> mean over the validation set.
        nonfinite: number of batches in a row, up to the last one, whose loss or gradients were not finite. While it is
            above 0, no checkpoint or export is written.
        stopping: whether a rank got a signal to stop: the engine saves a checkpoint after this batch, and ends.
        save_from: time (of `time.monotonic`) from which a checkpoint is overdue on this rank; infinite: never.
        overdue: whether a checkpoint is overdue on any rank: the engine saves one after this batch.
    """

    task: Task
    module: nn.Module
    optimizer: torch.optim.Optimizer
    clock: Clock
    device: torch.device
    precision: Precision
    batch: dict[str, Tensor]
    outputs: dict[str, Tensor]
    passes: int
    pass_number: int
    loss: float | None
    eval_label: str
    eval_figures: dict[str, float]
    nonfinite: int = 0
    stopping: bool = False
    save_from: float = math.inf
    overdue: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU. A dry run, whose device is meta, says here what the run's will be."""
        return self.device.type == "cpu"

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates: in each batch, looking for them in all modules takes too long."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def last_pass(self) -> bool:
        """Whether the current microbatch is the last one of the batch."""
        return self.pass_number + 1 == self.passes

    @abstractmethod
    def autocast(self) -> AbstractContextManager:
        """The autocast context in which the task is called."""

    @abstractmethod
    def gradient_scale(self) -> float:
        """The factor of the loss in backward passes under amp_fp16; 1 otherwise."""

    @abstractmethod
    def new_parameters(self) -> AbstractContextManager:
        """A context in which parameters of the task may be replaced; when it ends, the optimizer has the new ones."""

    @abstractmethod
    def peak_rates_changed(self) -> None:
        """The `initial_lr` of the optimizer's groups has changed: the schedule multiplies the new ones."""

    @abstractmethod
    def set_microbatch(self, samples: int) -> None:
        """Set the number of samples per device and microbatch, from the next batch on, also for validation."""

    @abstractmethod
    def log(self, figures: Mapping[str, float]) -> None:
        """Send values by name to the loggers, at the current batch. Raises as `check_figures`."""

    @abstractmethod
    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Send settings that were decided at the start of the run to the loggers."""

    @abstractmethod
    def log_images(self, name: str, images: np.ndarray) -> None:
        """Send images of shape (N, H, W, 3) and dtype uint8 to the loggers, at the current batch. Raises as
        `check_images`."""

    def skip_update(self) -> None:
        """Skip the update of this batch by clearing all gradients. Every rank must call it."""
        self.optimizer.zero_grad(set_to_none=True)
