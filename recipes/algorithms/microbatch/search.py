"""The largest microbatch that fits into every rank's memory, found without running out of it."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn

from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.microbatch.device_memory import DeviceMemory, Reading
from recipes.algorithms.modules.compile import Compile

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


class MicrobatchSearch(Algorithm):
    """Trains the first batches with growing microbatches, reads the memory each took, and stays at the largest.

    Composer's `auto` starts with the whole batch and halves it when a rank runs out of memory; ranks that run out at
    different sizes then wait for each other in different collectives. This search never runs out, and all ranks take
    the smallest of their proposals, by one all-reduce a batch. Gradients are those of any other microbatch; noise is
    drawn a microbatch at a time, so that a run repeats itself bit by bit from where the search has ended.

    What the run will allocate later is left free: a scheduled average that has not begun. What is to be compiled is
    not during the search, each size would be compiled anew; the size that was found is then measured with it. A
    checkpoint holds the result, for a run that goes on with the same samples on as many devices with as much memory.
    """

    def __init__(self, task: nn.Module, batch: int, meter: Meter | None = None) -> None:
        """
        Args:
            task: what is trained.
            batch: samples of a device's batch.
            meter: measures memory; None: that of the GPU.

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
        self.plan = Plan(batch)
        self.size = 1
        self.settled = False
        self.warm = False  # whether a batch was trained by what is measured
        self.compiling = False  # whether the size was found, and is measured with compiled modules
        self.place: dict[str, Any] | None = None  # what a result holds for
        self.found: dict[str, Any] | None = None  # the result with its place

    def match(self, event: Event, state: State) -> bool:
        if event == Event.BATCH_START:
            return not self.settled
        return event == Event.INIT or (event == Event.BATCH_END and not self.settled)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self.meter = self.meter or DeviceMemory()
            self._set(state)
        elif event == Event.BATCH_START:
            if self.place is None:
                self._go_on(state, logger)
                for algorithm in compiled(state) if not self.settled else ():
                    algorithm.pause(True)
            if not self.settled:
                self.meter.start()
        else:
            self._after_batch(state, logger)

    def _after_batch(self, state: State, logger: Logger) -> None:
        reading = self.meter.read()
        ready = self.warm and _has_state(state) and _samples(state.batch) == self.batch
        self.warm = True  # a process's first batch also makes the optimizer's state and libraries' workspaces
        proposal = 0
        if ready:
            self.plan.record(self.size, reading)
            to_come = bytes_to_come(state)
            fits = self.plan.fits(self.size, reading, to_come)
            proposal = self.size if self.compiling and fits else self.plan.next(self.size, reading, to_come)
        agreed = _least(proposal, state)
        if agreed == 0:  # some rank could not measure: the same size once more
            return
        if agreed < self.size:
            self.plan.lower(agreed)
        found, self.size = agreed == self.size, agreed
        self._set(state)
        if self.compiling:  # a new size is a new compilation, whose batch says nothing
            self.warm = found
            self.settled = found
        elif found:
            self._compile(state)
            self.settled = not self.compiling
        if self.settled:
            self.found = {"size": self.size, **self.place}
            self._say(logger, reading)

    def _compile(self, state: State) -> None:
        """Go on with what is to be compiled, where there is something: to measure the size that was found with it."""
        for algorithm in compiled(state):
            algorithm.pause(False)
            self.compiling = True
        if self.compiling:
            self.plan.lower(self.size)
            self.warm = False

    def _set(self, state: State) -> None:
        """Composer reads the size at the start of each batch."""
        state.device_train_microbatch_size = self.size
        for evaluator in state.evaluators:
            evaluator.device_eval_microbatch_size = self.size

    def _say(self, logger: Logger, reading: Reading) -> None:
        logger.log_hyperparameters({"microbatch": self.size})
        tried = ", ".join(str(size) for size in self.plan.growth)
        _print(
            f"microbatch: {self.size} of {self.batch} samples a device take "
            f"{(reading.held + reading.growth) / 1e9:,.1f} of {reading.usable / 1e9:,.1f} GB; tried {tried}"
        )

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The result, and what it holds for; nothing while the search goes on."""
        return {**super().state_dict(), **({"found": self.found} if self.found else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state.get("found")

    def _go_on(self, state: State, logger: Logger) -> None:
        """Take a checkpoint's result if it holds here. Every rank must call it, at the first batch."""
        loaded = self.found
        self.found = None
        self.place = {
            "devices": dist.get_world_size(),
            "memory": _least(self.meter.total, state),
            "batch": self.batch,
            "samples": {name: list(tensor.shape[1:]) for name, tensor in state.batch.items()},
            "precision": state.precision.value,
        }
        if loaded is None:
            return
        changed = [key for key, value in self.place.items() if loaded[key] != value]
        if changed:
            _print(f"microbatch: searched anew, the checkpoint's is for other {', '.join(changed)}")
            return
        self.size, self.found, self.settled = loaded["size"], loaded, True
        self._set(state)
        logger.log_hyperparameters({"microbatch": self.size})
        _print(f"microbatch: {self.size} of {self.batch} samples a device, as the checkpoint has it")


def compiled(state: State) -> list[Compile]:
    """The algorithms of a run that compile."""
    return [algorithm for algorithm in state.algorithms if isinstance(algorithm, Compile)]


def bytes_to_come(state: State) -> int:
    """Memory on this rank's device that algorithms of the run will take later."""
    return sum(a.bytes_to_come(state.model) for a in state.algorithms if isinstance(a, ScheduledEMA))


def _print(line: str) -> None:
    if dist.get_global_rank() == 0:
        print(line, flush=True)


def _has_state(state: State) -> bool:
    """Whether optimizers have made their state: a gradient scaler may skip the first steps."""
    return all(optimizer.state for optimizer in state.optimizers)


def _samples(batch: dict[str, torch.Tensor]) -> int:
    return len(next(iter(batch.values())))


def _least(value: int, state: State) -> int:
    """The smallest of all ranks' values."""
    tensor = state.device.tensor_to_device(torch.tensor([value], dtype=torch.int64))
    dist.all_reduce(tensor, reduce_operation="MIN")
    return int(tensor.item())
