"""Times of alternatives that take turns, so that other load on the machine affects all of them."""

import statistics
import time
from collections.abc import Callable

import torch

from recipes.engines.precision import allow_tf32


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
