"""A Composer run as levers and callbacks see it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from composer.core import Precision as Precisions
from composer.core import State
from composer.distributed.fsdp2_utils import sync_optimizer_and_model_params
from composer.loggers import Logger
from composer.trainer._scaler import ClosureGradScaler
from torch import Tensor, nn

from recipes.engines.precision import autocast, gradient_scaler
from recipes.training.clock import Clock
from recipes.training.microbatches import samples_of, with_batch_means
from recipes.training.run import Precision, Run, check_figures, check_images


class ComposerRun(Run):
    """Reads Composer's state at each question, so that there is nothing to keep up to date but the microbatches."""

    def __init__(self, task: nn.Module, precision: Precision | None = None) -> None:
        """
        Args:
            task: without ComposerModel or other wrappers around it.
            precision: of the run; None: the one that Composer was given.
        """
        self.task = task
        self._precision = precision
        self.passes = 1
        self.pass_number = 0
        self._state: State | None = None
        self._logger: Logger | None = None

    def attach(self, state: State, logger: Logger) -> None:
        """Take over Composer's state and logger; they stay the same objects for the whole run."""
        self._state, self._logger = state, logger
        on_gpu = state.device.name == "gpu"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.precision = self._precision or state.precision.value

    def complete_batch(self) -> None:
        """Add what the loss must know of the whole batch to the batch that has arrived."""
        self._state.batch = with_batch_means(self._state.batch, self.task, self.device)

    def use_precision(self) -> None:
        """Tell Composer of the precision once it has built everything: till then it refuses all but fp32 on a CPU.

        It has no autocast context for CPUs, which `ComposerTask` enters, and its scaler is a GPU's.
        """
        self._state.precision = Precisions(self.precision)
        if self.precision != "amp_fp16":
            # Scales nothing. Checkpoints of earlier versions, of steps within closures, have this class.
            self._state.scaler = ClosureGradScaler(enabled=False)
        elif not self.on_gpu:
            self._state.scaler = gradient_scaler(self.device, self.precision)

    def begin_batch(self) -> None:
        """Count the microbatches of the batch that has arrived."""
        samples = samples_of(self._state.batch)
        size = self._state.device_train_microbatch_size or samples
        self.passes, self.pass_number = math.ceil(samples / size), -1

    def begin_pass(self) -> None:
        """Count a microbatch, whose forward pass begins."""
        self.pass_number += 1
        # With its last results Composer keeps autograd's nodes of the parameters, which this pass would use again. They
        # belong to the stream on which they were made, and a CUDA graph cannot have work of two streams.
        self._state.outputs = self._state.loss = None

    @property
    def clock(self) -> Clock:
        """
        Raises:
            ValueError: the levers are only changing the model: Composer gets the length of the run afterwards, and then
                the checkpoint.
        """
        if self._state.max_duration is None:
            raise ValueError(
                "algorithms: run.clock was asked for in check_machine or change_modules, where Composer has none yet; "
                "use it from `loaded` on"
            )
        return clock_of(self._state)

    @property
    def module(self) -> nn.Module:
        return self._state.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._state.optimizers[0]

    @property
    def batch(self) -> dict[str, Tensor]:
        return self._state.batch

    @batch.setter
    def batch(self, batch: dict[str, Tensor]) -> None:
        self._state.batch = batch

    @property
    def outputs(self) -> dict[str, Tensor]:
        return self._state.outputs

    @property
    def loss(self) -> float | None:
        return self._state.total_loss_dict.get("loss/train/total")

    @property
    def eval_label(self) -> str:
        return self._state.dataloader_label

    @property
    def eval_figures(self) -> dict[str, float]:
        # Only this set's: others may have nothing yet, and computing theirs would wait for the other ranks.
        metrics = self._state.eval_metrics[self.eval_label]
        return {name: float(metric.compute()) for name, metric in metrics.items()}

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.precision)

    def gradient_scale(self) -> float:
        return self._state.scaler.get_scale() if self.precision == "amp_fp16" else 1.0

    def new_parameters(self) -> AbstractContextManager:
        return sync_optimizer_and_model_params(self.optimizer, self._state.model)

    def peak_rates_changed(self) -> None:
        for schedule in self._state.schedulers:
            schedule.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]

    def set_microbatch(self, samples: int) -> None:
        """Composer reads the size at the start of each batch."""
        self._state.device_train_microbatch_size = samples
        for evaluator in self._state.evaluators:
            evaluator.device_eval_microbatch_size = samples

    def log(self, figures: Mapping[str, float]) -> None:
        self._logger.log_metrics(dict(check_figures(figures)))

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self._logger.log_hyperparameters(dict(settings))

    def log_images(self, name: str, images: np.ndarray) -> None:
        step = self._state.timestamp.batch.value
        images = check_images(name, images)
        self._logger.log_images(images, name=name, channels_last=True, step=step, use_table=False)


def clock_of(state: State) -> Clock:
    """Composer's timestamp as a clock."""
    now, before = state.timestamp, state.previous_timestamp
    return Clock(
        batch=now.batch.value,
        sample=now.sample.value,
        epoch=now.epoch.value,
        duration=f"{state.max_duration.value}{state.max_duration.unit.value}",
        epoch_batches=None if state.dataloader_len is None else int(state.dataloader_len),
        epoch_began=now.batch.value - now.batch_in_epoch.value,
        before=(0, 0, 0) if before is None else (before.batch.value, before.sample.value, before.epoch.value),
    )
