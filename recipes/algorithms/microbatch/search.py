"""The largest microbatch that fits into every rank's memory, found without running out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from data.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.microbatch.device_memory import DeviceMemory, Reading
from recipes.algorithms.modules.compile import Compile
from recipes.training.lever import Lever
from recipes.training.ranks import smallest, world_size
from recipes.training.run import Run

HEADROOM = 0.9  # share of the usable memory that training may take: validation and fragmentation have the rest
GROWTH = 4  # largest step from one size to the next


class Meter(Protocol):
    """What measures memory: `DeviceMemory`, or a test's."""

    total: int

    def start(self) -> None: ...

    def read(self) -> Reading: ...


class Plan:
    """From the memory that microbatches took to the next one to try. Pure arithmetic, one rank's view.

    Activations grow by a line: growth(m) = a + b m, through the two largest sizes that were measured. A size is tried
    only if it fits by that line with headroom, and fits the whole memory even if all of the growth were proportional
    to the microbatch. Real growth is less (gradients and workspaces do not grow), so that no trial runs out.

    Attributes:
        growth: bytes above what is held between batches, by microbatch.
    """

    def __init__(self, batch: int) -> None:
        """
        Args:
            batch: samples of a device's batch, 1 or more.
        """
        self.batch = batch
        self.ceiling = batch
        self.growth: dict[int, int] = {}

    def record(self, size: int, reading: Reading) -> None:
        """A batch was trained with microbatches of `size`."""
        self.growth[size] = max(reading.growth, 1)

    def next(self, size: int, reading: Reading, to_come: int = 0) -> int:
        """The size to try after `size`, which was recorded last; `size` itself where it is the one to keep.

        Args:
            size: samples.
            reading: of that size.
            to_come: bytes to leave for what the run will allocate later.
        """
        room = HEADROOM * reading.usable - reading.held - to_come
        wall = reading.usable - reading.held - to_come
        target = even(max(min(self._largest(room), self.ceiling), 1), self.batch)
        if target <= size:
            return target
        proportional = int(size * wall / self.growth[size])
        return max(size, min(target, GROWTH * size, proportional))

    def fits(self, size: int, reading: Reading, to_come: int = 0) -> bool:
        """Whether a size that was recorded leaves the headroom free."""
        return self.growth[size] <= HEADROOM * reading.usable - reading.held - to_come

    def lower(self, size: int) -> None:
        """Never propose more than `size` again: the search went down to it, and would otherwise go to and fro."""
        self.ceiling = size

    def _largest(self, room: float) -> int:
        """The largest size whose growth is at most `room` bytes, by the line."""
        largest = max(self.growth)
        if len(self.growth) == 1:
            return 2 * largest if self.growth[largest] <= room else largest - 1
        before = max(size for size in self.growth if size != largest)
        slope = (self.growth[largest] - self.growth[before]) / (largest - before)
        if slope <= 0:  # lost in what does not grow
            return self.batch if self.growth[largest] <= room else largest - 1
        return math.floor(largest + (room - self.growth[largest]) / slope)


def even(largest: int, batch: int) -> int:
    """The microbatch to take where `largest` fits: one that divides the batch, unless that is half of it or less.

    Microbatches of one size are compiled once and captured once as a CUDA graph.
    """
    if largest >= batch:
        return batch
    divisor = max(size for size in range(1, largest + 1) if batch % size == 0)
    return divisor if 2 * divisor > largest else math.ceil(batch / math.ceil(batch / largest))


class MicrobatchSearch(Lever):
    """Trains the first batches with growing microbatches, reads the memory each took, and stays at the largest.

    Composer's `auto` starts with the whole batch and halves it when a rank runs out of memory; ranks that run out at
    different sizes then wait for each other in different collectives. This search never runs out, and all ranks take
    the smallest of their proposals, by one all-reduce a batch. Gradients are those of any other microbatch; noise is
    drawn a microbatch at a time, so that a run repeats itself bit by bit from where the search has ended.

    What the run will allocate later is left free: a scheduled average that has not begun. What is to be compiled is
    not during the search, each size would be compiled anew; the size that was found is then measured with it. A
    checkpoint holds the result, for a run that goes on with the same samples on as many devices with as much memory.
    """

    def __init__(
        self,
        task: nn.Module,
        batch: int,
        meter: Meter | None = None,
        average: ScheduledEMA | None = None,
        compiled: Sequence[Compile] = (),
    ) -> None:
        """
        Args:
            task: what is trained.
            batch: samples of a device's batch.
            meter: measures memory; None: that of the GPU.
            average: for whose beginning memory is left free.
            compiled: levers that wait with compiling until the size is found.

        Raises:
            ValueError: the task's loss compares the samples of a microbatch, so that their number is part of it.
        """
        if task.compares_samples:
            raise ValueError(
                "training.microbatch: auto would change what is learned: the model's loss compares the samples of a "
                "microbatch with each other; give a number, or null for the whole device batch"
            )
        self.batch = batch
        self.meter = meter
        self.average = average
        self.compiled = list(compiled)
        self.plan = Plan(batch)
        self.size = 1
        self.settled = False
        self.device_batch = 0  # samples of the batch at hand
        self.warm = False  # whether a batch was trained by what is measured
        self.compiling = False  # whether the size was found, and is measured with compiled modules
        self.place: dict[str, Any] | None = None  # what a result holds for
        self.found: dict[str, Any] | None = None  # the result with its place

    def change_modules(self, run: Run) -> None:
        self.meter = self.meter or DeviceMemory()
        run.set_microbatch(self.size)

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
        ready = self.warm and bool(run.optimizer.state) and self.device_batch == self.batch
        self.warm = True  # a process's first batch also makes the optimizer's state and libraries' workspaces
        proposal = 0
        if ready:
            self.plan.record(self.size, reading)
            to_come = 0 if self.average is None else self.average.bytes_to_come()
            fits = self.plan.fits(self.size, reading, to_come)
            proposal = self.size if self.compiling and fits else self.plan.next(self.size, reading, to_come)
        agreed = smallest(proposal, run.device)
        if agreed == 0:  # some rank could not measure: the same size once more
            return
        if agreed < self.size:
            self.plan.lower(agreed)
        found, self.size = agreed == self.size, agreed
        run.set_microbatch(self.size)
        if self.compiling:  # a new size is a new compilation, whose batch says nothing
            self.warm = found
            self.settled = found
        elif found:
            self._compile()
            self.settled = not self.compiling
        if self.settled:
            self.found = {"size": self.size, **self.place}
            self._say(run, reading)

    def _compile(self) -> None:
        """Go on with what is to be compiled, where there is something: to measure the size that was found with it."""
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
            f"microbatch: {self.size} of {self.batch} samples a device take "
            f"{(reading.held + reading.growth) / 1e9:,.1f} of {reading.usable / 1e9:,.1f} GB; tried {tried}"
        )

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The result, and what it holds for; nothing while the search goes on."""
        return {"found": self.found} if self.found else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state.get("found")

    def _go_on(self, run: Run) -> None:
        """Take a checkpoint's result if it holds here. Every rank must call it, at the first batch."""
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
            log.info(f"microbatch: searched anew, the checkpoint's is for other {', '.join(changed)}")
            return
        self.size, self.found, self.settled = loaded["size"], loaded, True
        run.set_microbatch(self.size)
        run.log_settings({"microbatch": self.size})
        log.info(f"microbatch: {self.size} of {self.batch} samples a device, as the checkpoint has it")


def samples_of(batch: dict[str, torch.Tensor]) -> int:
    """Samples of a batch."""
    return len(next(iter(batch.values())))
