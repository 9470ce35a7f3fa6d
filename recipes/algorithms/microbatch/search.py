"""The largest microbatch that fits into every rank's memory, found without running out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from data.system.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.graphs.cuda_graphs import CudaGraphs
from recipes.algorithms.microbatch.device_memory import DeviceMemory, Reading
from recipes.algorithms.modules.compile import Compile
from recipes.training.lever import Lever
from recipes.training.microbatches import samples_of
from recipes.training.ranks import smallest, world_size
from recipes.training.run import Run

HEADROOM = 0.9  # share of the usable memory that training may take: validation and fragmentation have the rest
GROWTH = 4  # largest step from one size to the next
STATELESS = 5  # steps after which an optimizer without a state, such as SGD without momentum, is taken to keep none


class MicrobatchPlan:
    """Proposes the next microbatch size from the memory that earlier ones took: pure arithmetic, for a single rank.

    Memory is modelled as a line through the two largest sizes m that were measured, growth(m) = a + b m. A size is
    tried only if it fits with headroom by that line, and also fits into the whole memory if all of the growth were
    proportional to m. Real growth is less (gradients and workspaces do not grow), so no trial runs out of memory.

    Attributes:
        batch: samples per device and batch.
        ceiling: the largest size that is still proposed.
        growth: microbatch size -> bytes on top of what is held between batches.
    """

    def __init__(self, batch: int) -> None:
        """
        Args:
            batch: samples per device and batch, 1 or more.
        """
        self.batch = batch
        self.ceiling = batch
        self.growth: dict[int, int] = {}

    def record(self, size: int, reading: Reading) -> None:
        """Record the memory that a batch took with microbatches of `size` samples."""
        self.growth[size] = max(reading.growth, 1)

    def next(self, size: int, reading: Reading, to_come: int = 0) -> int:
        """The size to try after `size`, which was recorded last; `size` itself if it is the one to keep.

        Args:
            size: samples per microbatch.
            reading: the memory that it took.
            to_come: bytes to leave free for what the run will allocate later.
        """
        room = HEADROOM * reading.usable - reading.held - to_come
        wall = reading.usable - reading.held - to_come
        largest = max(self._largest(room), 1)
        # The ceiling is an even part already. Of 99 samples up to 83 make parts of 50, but up to 50 make parts of 33.
        target = self.ceiling if largest >= self.ceiling else even(largest, self.batch)
        if target <= size:
            return target
        return min(target, GROWTH * size, int(size * wall / self.growth[size]))

    def fits(self, size: int, reading: Reading, to_come: int = 0) -> bool:
        """Whether a size that was recorded leaves the headroom free."""
        return self.growth[size] <= HEADROOM * reading.usable - reading.held - to_come

    def lower(self, size: int) -> None:
        """Never propose more than `size` again: the search went down to it, and could otherwise oscillate."""
        self.ceiling = size

    def _largest(self, room: float) -> int:
        """The largest size whose growth is at most `room` bytes, by the line."""
        largest = max(self.growth)
        if len(self.growth) == 1:
            return 2 * largest if self.growth[largest] <= room else largest - 1
        before = max(size for size in self.growth if size != largest)
        slope = (self.growth[largest] - self.growth[before]) / (largest - before)
        if slope <= 0:  # what grows is hidden by what does not
            return self.batch if self.growth[largest] <= room else largest - 1
        return math.floor(largest + (room - self.growth[largest]) / slope)


def even(largest: int, batch: int) -> int:
    """The microbatch size if up to `largest` fits: the largest divisor of the batch, unless it is below half of that.

    Microbatches of one size are compiled once and captured once as a CUDA graph.
    """
    if largest >= batch:
        return batch
    divisor = max(size for size in range(1, largest + 1) if batch % size == 0)
    return divisor if 2 * divisor > largest else math.ceil(batch / math.ceil(batch / largest))


class MicrobatchSearch(Lever):
    """Trains the first batches with growing microbatches, measures the memory of each, and keeps the largest that fits.

    Searches that start with the whole batch and halve it when a rank runs out of memory can deadlock: ranks that run
    out at different sizes wait for each other in different collectives. This search never runs out of memory, and all
    ranks take the smallest of their proposals, by one all-reduce per batch. Gradients do not depend on the microbatch,
    but noise is drawn per microbatch, so a run repeats itself bit by bit only from where the search has ended.

    Memory that the run will allocate later is left free: that of a scheduled average that has not begun. Modules are
    not compiled during the search, as each size would need its own compilation; the size that was found is then
    measured with compiled modules. A checkpoint holds the result; a run that resumes with samples of the same shape,
    on as many devices with as much memory, goes on with it.
    """

    def __init__(
        self,
        task: nn.Module,
        batch: int,
        meter: DeviceMemory | None = None,
        average: ScheduledEMA | None = None,
        compiled: Sequence[Compile | CudaGraphs] = (),
    ) -> None:
        """
        Args:
            task: the model.
            batch: samples per device and batch.
            meter: measures memory; None: `DeviceMemory`.
            average: memory is left free for it until it begins; None: the run has none.
            compiled: levers that compile or capture only when the size is found.

        Raises:
            ValueError: the task's loss or its norms compare the samples of a microbatch, so their number changes what
                is learned.
        """
        if task.compares_samples:
            raise ValueError(
                "training.microbatch: auto would change what is learned: the model's loss compares the samples of a "
                "microbatch with each other; give a number, or null for the whole device batch"
            )
        for name, module in task.named_modules():
            if isinstance(module, _BatchNorm) and module.training:  # else its statistics are fixed
                raise ValueError(
                    f"training.microbatch: auto would change what is learned: {name} ({type(module).__name__}) "
                    "has statistics of the samples of a microbatch; give a number, or null for the whole device batch"
                )
        self.batch = batch
        self.meter = meter
        self.average = average
        self.compiled = list(compiled)
        self.plan = MicrobatchPlan(batch)
        self.size = 1
        self.settled = False
        self.device_batch = 0  # samples of the batch at hand
        self.steps = 0  # of the optimizer: a gradient scaler may skip the first ones
        self.warm = False  # whether a batch was trained in the present setting, so that the next one can be measured
        self.compiling = False  # whether the size was found, and is being measured with compiled modules
        self.place: dict[str, Any] | None = None  # what the result depends on
        self.found: dict[str, Any] | None = None  # the result, with what it depends on

    def change_modules(self, run: Run) -> None:
        run.set_microbatch(self.size)

    def begin(self, run: Run) -> None:
        self.meter = self.meter or DeviceMemory()

        def count(*_: Any) -> None:
            self.steps += 1

        count.only_looks = True  # see `recipes.engines.checkpoints.own_optimizers.is_own`
        run.optimizer.register_step_post_hook(count)

    def batch_start(self, run: Run) -> None:
        if self.settled:
            return
        if self.place is None:
            self._go_on(run)
            for lever in self.compiled if not self.settled else ():
                lever.pause(True)
        if not self.settled:
            self.device_batch = samples_of(run.batch)
            self.meter.start()

    def step_end(self, run: Run) -> None:
        if not self.settled:
            self._after_batch(run)

    def _after_batch(self, run: Run) -> None:
        reading = self.meter.read()
        has_its_state = bool(run.optimizer.state) or self.steps >= STATELESS
        ready = self.warm and has_its_state and self.device_batch == self.batch
        self.warm = True  # the first batch also allocates the optimizer's state and workspaces of libraries
        proposal = 0
        if ready:
            self.plan.record(self.size, reading)
            to_come = 0 if self.average is None else self.average.bytes_to_come()
            fits = self.plan.fits(self.size, reading, to_come)
            proposal = self.size if self.compiling and fits else self.plan.next(self.size, reading, to_come)
        agreed = smallest(proposal, run.device)
        if agreed == 0:  # some rank could not measure yet: the same size once more
            return
        if agreed < self.size:
            self.plan.lower(agreed)
        found, self.size = agreed == self.size, agreed
        run.set_microbatch(self.size)
        # cuDNN's trials for a new shape allocate the largest workspace of all algorithms that fit into free memory.
        self.warm = found or not torch.backends.cudnn.benchmark
        if self.compiling:  # a new size is compiled or captured anew, and the batch that does so is not measured
            for lever in () if found else self.compiled:
                lever.pause(False)
            self.warm = found
            self.settled = found
        elif found:
            self._compile()
            self.settled = not self.compiling
        if self.settled:
            self.found = {"size": self.size, **self.place}
            self._say(run, reading)

    def _compile(self) -> None:
        """Turn compiled modules on if the run has any, to measure the size that was found with them."""
        for lever in self.compiled:
            lever.pause(False)
            self.compiling = True
        if self.compiling:
            self.plan.lower(self.size)
            self.warm = False

    def _say(self, run: Run, reading: Reading) -> None:
        run.log_settings({"microbatch": self.size})
        tried = ", ".join(str(size) for size in self.plan.growth)
        log.info(
            f"microbatch: {self.size} of {self.batch} samples per device take "
            f"{(reading.held + reading.growth) / 1e9:,.1f} of {reading.usable / 1e9:,.1f} GB; tried {tried}"
        )

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The result, and what it depends on; empty while the search goes on."""
        return {"found": self.found} if self.found else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state.get("found")

    def _go_on(self, run: Run) -> None:
        """Take over the checkpoint's result if it is valid here. Every rank must call it, at the first batch."""
        loaded = self.found
        self.found = None
        self.place = {
            "devices": world_size(),
            "memory": smallest(self.meter.total, run.device),
            "batch": self.batch,
            "samples": {name: list(tensor.shape[1:]) for name, tensor in run.batch.items()},
            "precision": run.precision,
        }
        if loaded is None:
            return
        changed = [key for key, value in self.place.items() if loaded[key] != value]
        if changed:
            log.info(f"microbatch: searching again, as the checkpoint's result is for other {', '.join(changed)}")
            return
        self.size, self.found, self.settled = loaded["size"], loaded, True
        run.set_microbatch(self.size)
        run.log_settings({"microbatch": self.size})
        log.info(f"microbatch: {self.size} of {self.batch} samples per device, as in the checkpoint")
