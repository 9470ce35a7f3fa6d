"""How long ranks communicate, from a profile of a few steps."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
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
        # Not the profiler's own `events()`: it builds a tree of all operators, which takes ten times as long.
        return communication(self.profiler.profiler.kineto_results.events(), self.on_gpu) / 1e9 / seconds

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def communication(events: Iterable[Any], on_gpu: bool) -> float:
    """Nanoseconds of communication, as `CommunicationProfile` defines it, in a profile's Kineto events."""
    communicating: list[Span] = []
    computing: list[Span] = []
    for event in events:
        name, span = event.name(), (event.start_ns(), event.end_ns())
        if not on_gpu:
            if name.startswith("gloo:"):
                communicating.append(span)
        elif event.device_type() == DeviceType.CUDA:
            (communicating if "nccl" in name.lower() else computing).append(span)
    return covered(communicating + computing) - covered(computing)


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
