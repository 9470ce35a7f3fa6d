"""How long ranks communicate, from a profile of a few steps."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # beginning and end


class CommunicationProfile:
    """Profiles steps, from its construction until `stop`.

    On a GPU the result is the time in which an NCCL kernel runs and no other kernel does: what computation does not
    hide. On a CPU it is the time in which a gloo collective is under way, which shares the cores with the rest.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        self._wait()
        self.profiler.start()
        self.began = perf_counter()

    def stop(self) -> float:
        """End the profile; returns the share of communication in the profiled time, from 0 to 1."""
        self._wait()
        seconds = perf_counter() - self.began
        self.profiler.stop()
        return communication(self.profiler.events(), self.on_gpu) / 1e6 / seconds

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def communication(events: Iterable[FunctionEvent], on_gpu: bool) -> float:
    """Microseconds of communication, as `CommunicationProfile` defines it, in a profile's events."""
    communicating: list[Span] = []
    computing: list[Span] = []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if not on_gpu:
            if event.name.startswith("gloo:"):
                communicating.append(span)
        elif event.device_type == DeviceType.CUDA:
            (communicating if "nccl" in event.name.lower() else computing).append(span)
    return covered(communicating + computing) - covered(computing)


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
