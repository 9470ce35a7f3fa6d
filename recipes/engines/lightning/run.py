"""A Lightning run as levers and callbacks see it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from recipes.engines.counts import Counts
from recipes.engines.logs.loggers import RunLoggers
from recipes.engines.precision import autocast, gradient_scaler
from recipes.training.clock import Clock
from recipes.training.microbatches import split, with_batch_means
from recipes.training.run import Precision, Run, check_figures, check_images


class LightningRun(Run):
    """What the engine keeps up to date for levers and callbacks.

    Attributes:
        counts: how much is done.
        epoch_batches: optimizer steps per epoch; None if the data has no known end.
        microbatch: largest number of samples that a device takes at once; None: all of its batch.
        ddp: DistributedDataParallel around the task, where there are several whole copies of it.
        scaler: of gradients, under amp_fp16.
        loggers: where figures go.
    """

    def __init__(
        self,
        task: nn.Module,
        *,
        device: torch.device,
        precision: Precision,
        duration: str,
        epoch_batches: int | None,
        microbatch: int | None,
        loggers: RunLoggers,
    ) -> None:
        """
        Args:
            task: what is trained.
            device: of this rank.
            precision: of the forward and backward pass.
            duration: length of the run.
            epoch_batches: see the attributes.
            microbatch: see the attributes.
            loggers: where figures go.
        """
        self.task = task
        self.device = device
        self.precision = precision
        self.batch: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.passes = 1
        self.pass_number = 0
        self.loss = None
        self.eval_label = ""
        self.eval_figures: dict[str, float] = {}
        self.counts = Counts()
        self.epoch_batches = epoch_batches
        self.microbatch = microbatch
        self.ddp: DistributedDataParallel | None = None
        self.scaler = gradient_scaler(device, precision)
        self._before = (0, 0, 0)
        self._duration = duration
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: LRScheduler | None = None
        self.loggers = loggers

    # --- what the engine does ------------------------------------------------------------------

    def set_optimizer(self, optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> None:
        """The optimizer and its schedule have been built."""
        self._optimizer, self._schedule = optimizer, schedule

    def begin_batch(self, batch: dict[str, Tensor]) -> None:
        """A batch has arrived, on the host; it will be divided as `set_microbatch` says by now."""
        self.batch = with_batch_means(batch, self.task, self.device)

    def divide(self) -> list[dict[str, Tensor]]:
        """The microbatches of the batch at hand, on the host."""
        microbatches = split(self.batch, self.microbatch)
        self.passes, self.pass_number = len(microbatches), -1
        return microbatches

    def begin_pass(self, microbatch: dict[str, Tensor]) -> None:
        """Count a microbatch, which is on the device."""
        self.batch = microbatch
        self.pass_number += 1

    def step_done(self, samples: int) -> None:
        """Count a step of the optimizer on this many samples, over all ranks."""
        self._advance(self.counts.after_batch(samples))

    def epoch_done(self) -> None:
        """Count the present epoch, which is complete."""
        self._advance(self.counts.after_epoch())

    def _advance(self, counts: Counts) -> None:
        self._before = (self.counts.batch, self.counts.sample, self.counts.epoch)
        self.counts = counts

    @property
    def epoch_is_complete(self) -> bool:
        """Whether all batches of the present epoch are done, before the epoch itself is counted."""
        return self.epoch_batches is not None and self.counts.batch_in_epoch >= self.epoch_batches

    # --- what levers and callbacks see ---------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return Clock(
            batch=self.counts.batch,
            sample=self.counts.sample,
            epoch=self.counts.epoch,
            duration=self._duration,
            epoch_batches=self.epoch_batches,
            epoch_began=self.counts.batch - self.counts.batch_in_epoch,
            before=self._before,
        )

    @property
    def module(self) -> nn.Module:
        return self.task if self.ddp is None else self.ddp

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "the optimizer is built after the levers have prepared the task"
        return self._optimizer

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.precision)

    def gradient_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def new_parameters(self) -> AbstractContextManager:
        """Does nothing: the optimizer is built afterwards."""
        return nullcontext()

    def peak_rates_changed(self) -> None:
        """Also called when a checkpoint has been loaded."""
        self._schedule.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]

    def set_microbatch(self, samples: int) -> None:
        self.microbatch = samples

    def log(self, figures: Mapping[str, float]) -> None:
        self.loggers.log(check_figures(figures), self.counts.batch)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self.loggers.log_settings(settings)

    def log_images(self, name: str, images: np.ndarray) -> None:
        self.loggers.log_images(name, check_images(name, images), self.counts.batch)
