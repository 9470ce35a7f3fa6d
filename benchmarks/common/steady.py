"""Measures the steady state of a run: windows of steps after a warm-up, losses, and peak memory."""

from __future__ import annotations

import atexit
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, TypeVar

import torch
from composer import Callback as ComposerCallback
from composer import Logger, State, Trainer
from composer.utils import dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from recipes.engines.composer.adapters import RunLevers, run_callback
from recipes.training.callback import Callback
from recipes.training.ranks import from_first_rank, is_first_rank
from recipes.training.run import Run

Ending = TypeVar("Ending", bound=ComposerCallback)


class Steady(ComposerCallback):
    """Times windows of whole steps, then ends the run. It is Composer's because recipes' callbacks cannot end a run.

    On a GPU it measures wall time, including waits for data. On a CPU it measures the CPU time of this process (of all
    its threads), because wall time would include the work of other programs.

    Attributes:
        rates: samples/s of each window, over all ranks.
        by_clock: the same in wall time, on a CPU too.
        losses: the training loss of every step up to the end of the last window.
        peak: largest memory of tensors on this rank in bytes. On a GPU as measured by its allocator in the windows,
            without the trials of libraries and levers in the warm-up; on a CPU the memory held before the last step of
            the warm-up plus the growth during that step.
    """

    def __init__(self, warm_up: int, windows: int, steps: int, more: int = 0) -> None:
        """
        Args:
            warm_up: steps before the first window, 2 or more.
            windows: number of windows.
            steps: steps per window.
            more: steps after the last window, such as one that is profiled, which must not slow those that are timed.

        Raises:
            ValueError: the warm-up is too short.
        """
        if warm_up < 2:
            raise ValueError(f"steady: a warm-up of {warm_up} steps is too short; give 2 or more")
        self.warm_up, self.windows, self.steps, self.more = warm_up, windows, steps, more
        self.rates: list[float] = []
        self.by_clock: list[float] = []
        self.losses: list[float] = []
        self.peak = 0
        self.began = (0.0, 0.0, 0)
        self.profiler: profile | None = None

    def batch_start(self, state: State, logger: Logger) -> None:
        # In the last step of the warm-up, the optimizer already has its state.
        if state.device.name != "gpu" and state.timestamp.batch.value == self.warm_up - 1:
            self.peak = live_bytes()
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.peak += largest_growth(self.profiler)
            self.profiler = None
        done = state.timestamp.batch.value - self.warm_up
        if len(self.rates) < self.windows:
            self.losses.append(float(state.total_loss_dict["loss/train/total"]))
            if done >= 0 and not done % self.steps:
                self._end_window(state, first=not done)
        if done >= self.windows * self.steps + self.more:
            state.stop_training()

    def _end_window(self, state: State, first: bool) -> None:
        """Between windows: note the rate of the one that ends, and begin another. The first one ends the warm-up."""
        gpu = state.device.name == "gpu"
        if gpu:
            torch.cuda.synchronize()
        own_clock = time.perf_counter if gpu else time.process_time
        now, clock, samples = own_clock(), time.perf_counter(), state.timestamp.sample.value
        if not first:
            self.rates.append((samples - self.began[2]) / (now - self.began[0]))
            self.by_clock.append((samples - self.began[2]) / (clock - self.began[1]))
        if gpu and first:
            torch.cuda.reset_peak_memory_stats()
        elif gpu:
            self.peak = torch.cuda.max_memory_allocated()
        self.began = own_clock(), time.perf_counter(), samples


def live_bytes() -> int:
    """Bytes of all tensors on the CPU that Python's garbage collector knows; shared memory counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # No subclasses: fake tensors of the compiler have no memory, and the shard of a DTensor is a Tensor itself.
        if type(thing) not in (Tensor, nn.Parameter):
            continue
        try:
            if thing.device.type == "cpu" and thing.layout is torch.strided:
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        except RuntimeError:  # undefined tensors of autograd have no device, and those that stand for others no memory
            continue
    return sum(storages.values())


def largest_growth(profiler: profile) -> int:
    """The largest number of bytes that the profiled work held at once, beyond those held before it."""
    held = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def watch(trainer: Trainer, callback: Callback) -> None:
    """Add a callback to a trainer that `recipes.engines.composer.trainer` built."""
    (levers,) = [algorithm for algorithm in trainer.state.algorithms if isinstance(algorithm, RunLevers)]
    trainer.state.callbacks.append(run_callback(callback, levers.run))


def run_until(trainer: Trainer, ending: Ending) -> Ending:
    """Train until a callback ends the run, then release the memory of the trainer. Returns the callback."""
    trainer.state.callbacks.append(ending)
    trainer.fit()
    trainer.close()
    atexit.unregister(trainer.engine._close)  # it would keep model and optimizer until the process ends
    return ending


class UnderLightning(Callback):
    """Measurements that are Composer's callbacks, in a run of Lightning, which has to end by itself."""

    def __init__(self, measurements: Sequence[ComposerCallback]) -> None:
        self.measurements = measurements

    def batch_start(self, run: Run) -> None:
        self._call("batch_start", run)

    def step_end(self, run: Run) -> None:
        self._call("batch_end", run)

    def _call(self, moment: str, run: Run) -> None:
        state = SimpleNamespace(
            device=SimpleNamespace(name="gpu" if run.on_gpu else "cpu"),
            timestamp=SimpleNamespace(
                batch=SimpleNamespace(value=run.clock.batch), sample=SimpleNamespace(value=run.clock.sample)
            ),
            total_loss_dict={"loss/train/total": run.loss},
            stop_training=lambda: None,
        )
        for measurement in self.measurements:
            getattr(measurement, moment)(state, None)


def on_first_rank(work: Callable[[], Any]) -> Any:
    """Call `work` on the first rank only, and return its result on every rank once it is done."""
    return from_first_rank(work() if is_first_rank() else None)


@contextmanager
def shared_folder() -> Iterator[tuple[Path, TextIO]]:
    """A temporary folder of all ranks, with a file for what this rank's runs print."""
    with ExitStack() as stack:
        folder = Path(on_first_rank(lambda: stack.enter_context(tempfile.TemporaryDirectory())))
        yield folder, stack.enter_context(open(folder / f"log{dist.get_global_rank()}.txt", "w", encoding="utf-8"))
        dist.barrier()


def free_memory() -> None:
    """Free memory that a finished run still occupies: compiled code, cycles of objects, cached GPU memory."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
