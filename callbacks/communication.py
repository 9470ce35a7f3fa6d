"""How long ranks talk to each other, from a profile of a few steps."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]  # beginning and end


class CommunicationProfile:
    """Profiles steps from its making on.

    On a GPU its answer is the time in which an NCCL kernel runs and no other kernel does: what the backward pass does
    not hide. On a CPU it is the time in which a gloo collective is under way, which shares the cores with the rest.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        self._wait()
        self.profiler.start()
        self.began = time.perf_counter()

    def stop(self) -> float:
        """Ends it; returns the share of the profiled time, 0 to 1."""
        self._wait()
        seconds = time.perf_counter() - self.began
        self.profiler.stop()
        return communication(self.profiler.events(), self.on_gpu) / 1e6 / seconds

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def communication(events: Iterable[FunctionEvent], on_gpu: bool) -> float:
    """Microseconds of communication, as `CommunicationProfile` defines it, in a profile's events."""
    talk: list[Interval] = []
    work: list[Interval] = []
    for event in events:
        interval = (event.time_range.start, event.time_range.end)
        if not on_gpu:
            if event.name.startswith("gloo:"):
                talk.append(interval)
        elif event.device_type == DeviceType.CUDA:
            (talk if "nccl" in event.name.lower() else work).append(interval)
    return covered(talk + work) - covered(work)


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
