"""FAIR's vision transformers by the planner: see `published.py`, which prints the rows.

Aggarwal et al., "Scaling vision transformers with FSDP", say neither the shapes of their models nor their batches, and
not on which GPUs a model of 1.5 billion parameters was the largest. Assumed here: ViT-H with width and depth in
proportion, 224 x 224 pixels, A100-80GB, and 32 images per GPU, from their bound of 4,096 images on 128 GPUs. They name
two fused operations, dropout and layer norm, and no fused attention: there is none here. Since they fuse dropout, there
is dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from benchmarks.published_transformers import FEW, Mixed, Vit, deepened
from data.cost import FLOAT
from recipes.planning.gpus import DEVICES, SHARES
from recipes.planning.settings import USABLE
from recipes.planning.step_time import pass_times
from recipes.planning.trace import BYTES, Trace, trace

LARGE, SMALL, PEAK = DEVICES["a100-80"], DEVICES["a100-40"], 312e12
GPUS, IMAGES = 128, 32
SPEED_UP, SPEED_UP_IMAGES = 2.2, 32  # of everything together, ViT-H on 8 A100-40GB
STATE = 4 * FLOAT  # bytes per value: weight, gradient and two moments
# Bytes per value that an update moves: PyTorch's AdamW of 2022 ran nine operations one after the other.
SEPARATE_UPDATE_BYTES = 92
WAYS = ("DDP", "one unit", "nested", "nested, recomputing")
REACHED = {"DDP": 1.5e9, "one unit": 4.5e9, "nested, recomputing": 120e9}


@cache
def vit(layers: int, mixed: Mixed, fused: bool, images: int) -> tuple[Trace, int, int]:
    """The pass of a ViT of ViT-H's proportions, its number of parameters, and that of its largest layer."""
    found, parameters = [], []
    for few in FEW:
        with torch.device("meta"):
            task = Vit(layers=few, width=40 * layers, heads=max(1, layers // 2), mixed=mixed, fused=fused)
        found.append(trace(task, Vit.batch(images)))
        parameters.append(sum(p.numel() for p in task.parameters()))
    block = parameters[1] - parameters[0]
    return deepened(*found, layers), parameters[0] + (layers - 1) * block, block


def memory(layers: int, way: str, images: int) -> tuple[float, int]:
    """Bytes on each GPU, and parameters. DDP is with AMP O1, FSDP with O2."""
    found, parameters, block = vit(layers, "O1" if way == "DDP" else "O2", False, images)
    kept = found.inputs + found.largest + found.outside if "recomputing" in way else found.kept
    if way == "DDP":  # autocast's 16-bit copies of the weights, and buckets for the gradients
        return (STATE + BYTES) * parameters + kept, parameters
    gathered = parameters if way == "one unit" else 2 * block
    # The gradients of a unit are whole until they are reduced.
    return STATE * parameters / GPUS + 2 * BYTES * gathered + kept, parameters


def largest(way: str, images: int) -> int:
    """Parameters of the largest ViT that fits."""
    low, high = 2, 512
    while high - low > 2:
        middle = (low + high) // 4 * 2
        low, high = (middle, high) if memory(middle, way, images)[0] <= USABLE * LARGE.memory else (low, middle)
    return memory(low, way, images)[1]


def speed_up(images: int) -> float:
    """Of FSDP, O2, fused dropout and fused layer norm over DDP and O1, for ViT-H on 8 GPUs."""
    seconds = []
    for mixed, fused, shards in (("O1", False, 1), ("O2", True, 8)):
        found, parameters, _ = vit(32, mixed, fused, images)
        update = SEPARATE_UPDATE_BYTES * parameters / shards / (SHARES.memory * SMALL.bandwidth)
        seconds.append(sum(pass_times(found, SMALL, PEAK, SHARES, False)) + update)
    return seconds[0] / seconds[1]


def vit_rows() -> Iterator[tuple[str, str, str, str]]:
    """What, published, predicted, and the difference."""
    for way in WAYS:
        found, published = largest(way, IMAGES), REACHED.get(way)
        known = "-" if published is None else f"{published / 1e9:.1f}B"
        off = "not published" if published is None else f"{found / published - 1:+.0%}"
        yield f"largest ViT, {way}", known, f"{found / 1e9:.1f}B", off
    found = speed_up(SPEED_UP_IMAGES)
    yield "speed-up of ViT-H by all levers", f"up to {SPEED_UP}", f"{found:.2f}", f"{found / SPEED_UP - 1:+.0%}"
