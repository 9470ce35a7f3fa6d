"""Times of alternatives that take turns, so that other load on the machine affects all of them."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from recipes.engines.precision import allow_tf32
from recipes.models.kernels.devices import hold

STEPS = 5  # that the GPU is given at once


def training_device() -> torch.device:
    """The GPU, or the CPU where there is none. From then on float32 products and convolutions are computed in TF32, as
    in training: without it, they take up to seven times as long on a GPU, and every share of them would be wrong."""
    allow_tf32()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def times(works: dict[str, Callable[[], None]], rounds: int, gpu: bool) -> dict[str, float]:
    """Median seconds per call of each alternative, in turns, after two rounds of warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 2):
        for name, work in works.items():
            if gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if gpu:
                torch.cuda.synchronize()
            if number >= 2:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def milliseconds(step: Callable[[], Any], seconds: float, device: torch.device) -> float:
    """Median time of a step in milliseconds, after a warm-up; on a GPU as `gpu_seconds`.

    Args:
        step: what is measured.
        seconds: how long it is repeated, at least five times.
        device: where it runs.
    """
    for _ in range(3):
        step()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 5 or time.perf_counter() - began < seconds:
        if device.type == "cuda":
            taken.append(gpu_seconds(step))
        else:
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def gpu_seconds(step: Callable[[], Any]) -> float:
    """Seconds that the GPU takes for a step by itself, without the host's time for launches, which in a whole training
    step goes on beside it. A short kernel takes a GPU less time than its launch takes Python.

    The host gives the GPU several steps while that waits, so that none of them waits for the host. It does so twice:
    the first time says how long the host takes.
    """
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    hold(1.5 * host)
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / STEPS
