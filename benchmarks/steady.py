"""Steady state of a training run: windows of steps after a warm-up, losses, and peak memory."""

from __future__ import annotations

import atexit
import gc
import sys
import time
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


class Steady(Callback):
    """Times windows of whole steps, and then ends the run.

    On a GPU by the clock, waits for data included; on a CPU by the time that this process computes (all its threads),
    because other programs there take what a clock would count.

    Attributes:
        rates: samples/s of each window, over all ranks.
        by_clock: the same by the clock, waits included, on a CPU too.
        losses: the training loss of every step.
        peak: largest memory of tensors on this rank in bytes. On a GPU as its allocator saw it from the start of the
            run; on a CPU what lives before the last step of the warm-up and what that step takes on top of it.
    """

    def __init__(self, warm_up: int, windows: int, steps: int) -> None:
        """
        Args:
            warm_up: steps before the first window, 2 or more.
            windows: number of windows.
            steps: of a window.
        """
        if warm_up < 2:
            raise ValueError(f"steady: a warm-up of {warm_up} steps is too short; give 2 or more")
        self.warm_up, self.windows, self.steps = warm_up, windows, steps
        self.rates: list[float] = []
        self.by_clock: list[float] = []
        self.losses: list[float] = []
        self.peak = 0
        self.began = (0.0, 0.0, 0)
        self.profiler: profile | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.device.name == "gpu":
            torch.cuda.reset_peak_memory_stats()

    def batch_start(self, state: State, logger: Logger) -> None:
        # The last of the warm-up: by then the optimizer has its state.
        if state.device.name != "gpu" and state.timestamp.batch.value == self.warm_up - 1:
            self.peak = live_bytes()
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.peak += largest_growth(self.profiler)
            self.profiler = None
        self.losses.append(float(state.total_loss_dict["loss/train/total"]))
        done = state.timestamp.batch.value - self.warm_up
        if done < 0 or done % self.steps:
            return
        if state.device.name == "gpu":
            torch.cuda.synchronize()
        own_clock = time.perf_counter if state.device.name == "gpu" else time.process_time
        now, clock, samples = own_clock(), time.perf_counter(), state.timestamp.sample.value
        if done:
            self.rates.append((samples - self.began[2]) / (now - self.began[0]))
            self.by_clock.append((samples - self.began[2]) / (clock - self.began[1]))
        if len(self.rates) == self.windows:
            if state.device.name == "gpu":
                self.peak = torch.cuda.max_memory_allocated()
            state.stop_training()
        self.began = own_clock(), time.perf_counter(), samples


def live_bytes() -> int:
    """Memory of every tensor on the CPU that Python knows, shared memory counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # Not of their subclasses: a compiler's stand-ins have no memory, and a DTensor's part is a Tensor by itself.
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def largest_growth(profiler: profile) -> int:
    """Most bytes that a profiled piece of work held at once, beyond those that it began with."""
    held = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def run_steady(trainer: Any, steady: Steady) -> Steady:
    """Trains until `steady` has its windows, and lets go of the trainer's memory."""
    trainer.state.callbacks.append(steady)
    trainer.fit()
    trainer.close()
    atexit.unregister(trainer.engine._close)  # which would hold model and optimizer until the process ends
    return steady


def on_first_rank(work: Any) -> Any:
    """What `work` gives on the first rank, on every rank, once it is done."""
    values = [work() if dist.get_global_rank() == 0 else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def let_go() -> None:
    """Frees what a run has left."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(line: str) -> None:
    """Prints on the first rank."""
    if dist.get_global_rank() == 0:
        print(line, file=sys.__stdout__, flush=True)
