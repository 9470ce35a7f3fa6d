"""Lightning's strategies for the ways in which a recipe divides its work: one device, copies of the model, shards."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy

from recipes.engines.data_parallel import data_parallel
from recipes.engines.lightning.processes import TIMEOUT
from recipes.engines.lightning.run import LightningRun
from recipes.training.ranks import world_size


class StaysOnDevice(Strategy):
    """Leaves model and optimizer where they are when a run ends.

    Lightning copies both to host memory, where nothing reads them: for Stable Diffusion 2's U-Net, 14 GB per rank.
    """

    def teardown(self) -> None:
        module = self.lightning_module
        self.optimizers = []
        if module is not None:
            module.cpu = lambda: module
        try:
            super().teardown()
        finally:
            if module is not None:
                del module.cpu


class TaskDDP(StaysOnDevice, DDPStrategy):
    """DistributedDataParallel around the task alone.

    Lightning wraps the whole module and runs `training_step`, with all of its microbatches, as one forward pass of it.
    Gradients could then be averaged once per microbatch only, and on a GPU the whole batch would be moved at once.
    """

    def __init__(self, run: LightningRun, averaged: bool) -> None:
        """
        Args:
            run: is given the wrapped task.
            averaged: a lever averages gradients, and the task is not wrapped.
        """
        super().__init__(timeout=TIMEOUT)
        self._run, self._averaged = run, averaged

    def configure_ddp(self) -> None:
        module = data_parallel(self._run.task, self._averaged)
        self._run.ddp = None if self._averaged else module


class OneDevice(StaysOnDevice, SingleDeviceStrategy):
    """One process, with all of the task."""


class DividedByLevers(ModelParallelStrategy):  # which leaves them, too
    """Levers divide and shard the task, on meshes of their own, when the module is configured."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=world_size(), tensor_parallel_size=1, timeout=TIMEOUT)


def strategy_of(run: LightningRun, divided: bool, averaged: bool) -> Strategy:
    """The strategy of a run.

    Args:
        run: of this process.
        divided: whether each rank holds a part of the task only.
        averaged: whether a lever averages the gradients of whole copies.
    """
    if divided:
        return DividedByLevers()
    if world_size() > 1:
        return TaskDDP(run, averaged)
    return OneDevice(run.device)
