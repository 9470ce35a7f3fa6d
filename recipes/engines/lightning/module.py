"""The one file that makes a training task a Lightning module: one step of training, and one of validation."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from data.loading import Batch, Loading
from recipes.algorithms.resilience.token_ids import look_at
from recipes.engines.generators import seed_all
from recipes.engines.lightning.data import EvalBatches, RunBatches
from recipes.engines.lightning.hook_calls import BetweenBatches, HookCalls
from recipes.engines.lightning.run import LightningRun
from recipes.engines.parts import Parts
from recipes.models.task import losses_of
from recipes.training.hooks import stops_nothing
from recipes.training.microbatches import samples_of, split
from recipes.training.ranks import all_reduce, rank, world_size
from recipes.training.transfer import HostCopy


class TaskModule(pl.LightningModule):
    """Trains a task by manual optimization: gradients accumulate as Composer's do, and levers finish them.

    A microbatch's loss is multiplied by its share of the batch, its number of samples divided by the mean batch of all
    ranks. Lightning's automatic accumulation would weigh all microbatches alike.
    """

    automatic_optimization = False

    def __init__(
        self,
        parts: Parts,
        run: LightningRun,
        hooks: HookCalls,
        between: BetweenBatches,
        batches: RunBatches,
        *,
        seed: int,
    ) -> None:
        """
        Args:
            parts: of the run.
            run: what levers and callbacks see.
            hooks: of levers and callbacks.
            between: what happens between batches.
            batches: training data.
            seed: of the run; each rank adds its own number.
        """
        super().__init__()
        self.task = parts.task
        self._parts = parts
        self._run = run
        self._hooks = hooks
        self._between = between
        self._batches = batches
        self._seed = seed

    # --- what is trained -----------------------------------------------------------------------

    def configure_model(self) -> None:
        """Levers change, shard and compile the task before the optimizer is built."""
        if not self._parts.divided:  # else levers move its parts
            self.task.to(self._run.device)
        seed_all(self._seed + rank())
        self._parts.levers.prepare(self._run)
        self._parts.levers.compile(self._run)

    def configure_optimizers(self) -> dict[str, Any]:
        """The recipe's optimizer, and its schedule; `training_step` steps both."""
        trained = [parameter for parameter in self.task.parameters() if parameter.requires_grad]
        optimizer = self._parts.new_optimizer(trained)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: self._parts.schedule(self._run.clock))
        self._run.set_optimizer(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # --- data ----------------------------------------------------------------------------------

    def train_dataloader(self) -> RunBatches:
        return self._batches

    def val_dataloader(self) -> list[EvalBatches]:
        """One loader per validation set."""
        evals = self._parts.evals.items()
        return [EvalBatches(loading, look_at(self.task, label, loading)) for label, loading in evals]

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """The batch as it is: microbatches are moved one by one."""
        return batch

    # --- steps ---------------------------------------------------------------------------------

    @stops_nothing
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One optimizer step."""
        run = self._run
        batch = run.batch  # with what `with_batch_means` added
        microbatches = run.divide()
        self._hooks.call("before_passes")
        run.optimizer.zero_grad(set_to_none=True)
        # The number of samples of all ranks stays on the device, so that the host does not wait for it.
        samples = torch.full((), samples_of(batch), dtype=torch.int64, device=run.device)
        all_reduce(samples)
        mean_batch = samples.double() / world_size()  # of a rank
        losses = {"total": torch.zeros(1, device=run.device)}
        for number, microbatch in enumerate(microbatches):
            last = number + 1 == len(microbatches)
            run.begin_pass(self._on_device(microbatch, self._parts.data))
            # DistributedDataParallel averages gradients in the last backward pass of a batch only.
            with nullcontext() if run.ddp is None or last else run.ddp.no_sync():
                share = torch.full_like(mean_batch, samples_of(microbatch)) / mean_batch
                for name, loss in self._microbatch(share).items():
                    losses[name] = losses.get(name, torch.zeros(1, device=run.device)) + loss
        run.batch = batch
        if run.scaler is not None:
            run.scaler.unscale_(run.optimizer)
        self._hooks.gradients_finished()
        sums = torch.cat(list(losses.values()))
        all_reduce(sums)
        figures = HostCopy(torch.cat([sums.double(), samples.double().reshape(1)]))
        self._step()
        *means, total_samples = figures.tolist()  # the host does not wait for the update
        self._log_losses({name: mean / world_size() for name, mean in zip(losses, means, strict=True)})
        # Before the clock moves on, as in Composer: each batch has the learning rate of the clock before its own.
        self.lr_schedulers().step()
        run.step_done(int(total_samples) // self._parts.copies)

    def _microbatch(self, share: Tensor) -> dict[str, Tensor]:
        """Forward and backward pass of the microbatch at hand; returns its losses times its share of the batch."""
        run = self._run
        self._hooks.call("before_forward")
        with run.autocast():
            losses = losses_of(run.task, run.module(run.batch))
        self._hooks.call("after_forward")
        self._hooks.call("before_backward")
        total = losses["total"]
        share = share.to(total.dtype)  # rounded as a number of the host is
        shares = {name: loss.detach().clone().mean() * share for name, loss in losses.items()}
        if run.scaler is not None:
            total = run.scaler.scale(total)
        self.manual_backward(total * share)
        self._hooks.call("after_backward")
        return shares

    def _step(self) -> None:
        scaler = self._run.scaler
        if scaler is None:
            self._run.optimizer.step()  # Lightning's would give it a closure that computes nothing
        else:
            scaler.step(self._run.optimizer)
            scaler.update()

    def _log_losses(self, means: dict[str, float]) -> None:
        self._run.loss = means["total"]
        size = self._run.microbatch or samples_of(self._run.batch)
        figures = {f"loss/train/{name}": value for name, value in means.items()}
        self._run.log(figures | {"trainer/device_train_microbatch_size": size})

    @stops_nothing
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch of a validation set."""
        loading = list(self._parts.evals.values())[dataloader_idx]
        for microbatch in split(batch, self._run.microbatch):
            self._between.evaluate(self._on_device(microbatch, loading))

    def _on_device(self, batch: Batch, loading: Loading) -> Batch:
        device = self._run.device
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        return moved if loading.on_device is None else loading.on_device(moved)

