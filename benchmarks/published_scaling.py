"""Megatron-LM's scaling by the planner: see `published.py`, which prints the rows.

Shoeybi et al. 2019, section 5.1: DGX-2H machines of 16 V100, batches of 8 sequences, recomputation of each layer. The
text repeats two numbers of the figure of weak scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache

import torch

from benchmarks.published_transformers import FEW, Gpt2, deepened
from data.cost import all_reduce_bytes
from recipes.planning.devices import Devices
from recipes.planning.gpus import DEVICES, Shares
from recipes.planning.step_time import UPDATE_BYTES, StepTime, message_seconds, pass_times
from recipes.planning.tensor_parallel import held, keep_part, messages
from recipes.planning.trace import BYTES, Trace, trace

V100, MACHINE = DEVICES["v100-32"], 16
V100_PEAK = 125e12  # FLOP/s, as `callbacks.peak_flops` has it; the paper's machines are clocked up to 130e12
SEQUENCES = 8
# Table 1: layers, width, heads -> GPUs.
GPT2 = {1: (40, 1536, 16), 2: (54, 1920, 20), 4: (64, 2304, 24), 8: (72, 3072, 32)}
BASELINE = 39e12  # FLOP/s on one GPU, by which `compute` is fitted
STRONG = {2: 1.64, 4: 2.34, 8: 2.98}  # table 3; `links` is fitted on the first
HEADS = {16: 0.82, 24: 0.80, 32: 0.77}  # table 2
WEAK, WEAK_512 = 0.77, 0.74
# Table 4: layers, width, heads -> devices that divide matrices, groups of them, days for 68,507 steps.
DAYS = {(24, 1024, 16): (1, 64, 0.86), (54, 1920, 20): (2, 64, 2.27), (72, 3072, 24): (8, 64, 2.10)}
DAY = 86400 / 68507  # seconds per step of an epoch that takes a day
# Megatron checkpoints whole layers: the recomputation repeats the two all-reduces of the forward pass.
REPEATED = 1.5


@cache
def gpt2_trace(layers: int, width: int, heads: int, devices: int) -> tuple[Trace, int, int, tuple[int, int]]:
    """The pass of one device, the values that it holds, those of the whole model, and its all-reduces."""
    found, own, whole = [], [], []
    for few in FEW:
        with torch.device("meta"):
            task = Gpt2(layers=few, width=width, heads=heads).to(torch.bfloat16)
        whole.append(sum(p.numel() for p in task.parameters()))
        own.append(held(task, task, Devices(devices, 1, devices)))
        if devices > 1:
            keep_part(task, devices)
        found.append(trace(task, Gpt2.batch(SEQUENCES)))
    parameters = whole[0] + (layers - 1) * (whole[1] - whole[0])
    mine = own[0] + (layers - 1) * (own[1] - own[0])
    (values,) = {m.values for m in messages(task.tensor_plan(), SEQUENCES, devices) if m.what == "branches"}
    return deepened(*found, layers), mine, parameters, (4 * layers, values)


def gpt2_step(sizes: tuple[int, int, int], devices: Devices, shares: Shares) -> tuple[StepTime, int]:
    """A step of Megatron, and the parameters of its model."""
    found, own, whole, (count, values) = gpt2_trace(*sizes, devices.tensor)
    compute, traffic, gaps = pass_times(found, V100, V100_PEAK, shares, recompute=True)
    update = UPDATE_BYTES * own / (shares.memory * V100.bandwidth)
    averaged = message_seconds(0, all_reduce_bytes(BYTES * own, devices.replicas), devices, MACHINE, V100, shares)
    exposed = 0.0
    if devices.tensor > 1:
        rate = shares.links * V100.within
        exposed = REPEATED * count * (all_reduce_bytes(BYTES * values, devices.tensor) / rate + shares.gap)
    return StepTime(compute, traffic, update, gaps, averaged, 0.0, exposed), whole


def gpt2_efficiency(sizes: tuple[int, int, int], devices: Devices, shares: Shares) -> float:
    """FLOP/s of each GPU as a share of those of one GPU with the smallest model."""
    one, smallest = gpt2_step(GPT2[1], Devices(1, 1), shares)
    time, parameters = gpt2_step(sizes, devices, shares)
    return parameters / smallest / devices.tensor * one.total / time.total


def speed_up(devices: int, shares: Shares) -> float:
    """Of the smallest model with the same batch."""
    steps = [gpt2_step(GPT2[1], Devices(n, 1, n), shares)[0].total for n in (1, devices)]
    return steps[0] / steps[1]


def fitted_v100(assumed: Shares) -> Shares:
    """`compute` by the rate of one GPU, then `links` by the speed-up on two; `memory` and `gap` are kept.

    8 FLOPs per parameter and token: forward pass, recomputation, and twice as many in the backward pass.
    """
    parameters = gpt2_trace(*GPT2[1], 1)[2]
    seconds = 8 * parameters * SEQUENCES * Gpt2.positions / BASELINE

    def one(shares: Shares) -> float:
        return gpt2_step(GPT2[1], Devices(1, 1), shares)[0].total

    compute = _solved(lambda share: one(dataclasses.replace(assumed, compute=share)) - seconds)
    shares = dataclasses.replace(assumed, compute=compute)
    links = _solved(lambda share: STRONG[2] - speed_up(2, dataclasses.replace(shares, links=share)))
    return dataclasses.replace(shares, links=links)


def _solved(excess: Callable[[float], float]) -> float:
    """The share at which a function that falls with it is 0."""
    low, high = 0.01, 1.0
    if excess(low) * excess(high) > 0:
        raise ValueError("no share between 1% and 100% gives the published number")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def megatron_rows(shares: Shares) -> Iterator[tuple[str, str, str, str]]:
    """What, published, predicted, and the difference, or what was fitted on it."""
    one, parameters = gpt2_step(GPT2[1], Devices(1, 1), shares)
    rate = 8 * parameters * SEQUENCES * Gpt2.positions / one.total
    yield "TFLOP/s, 1.2B on 1 GPU", f"{BASELINE / 1e12:.0f}", f"{rate / 1e12:.1f}", "fitted: compute"
    for devices, published in STRONG.items():
        note = "fitted: links" if devices == 2 else "predicted"
        predicted = speed_up(devices, shares)
        off = _off(predicted, published, note)
        yield f"speed-up of 1.2B on {devices} GPUs", f"{published:.2f}", f"{predicted:.2f}", off
    for devices, sizes in GPT2.items():
        if devices > 1:
            found = gpt2_efficiency(sizes, Devices(devices, 1, devices), shares)
            known = WEAK if devices == 8 else None
            yield _share_row(f"weak scaling, {_billions(sizes)} on {devices} GPUs", known, found)
    for heads, published in HEADS.items():
        if heads != 32:
            found = gpt2_efficiency((72, 3072, heads), Devices(8, 1, 8), shares)
            yield _share_row(f"weak scaling, 8.3B with {heads} heads on 8 GPUs", published, found)
    for devices, sizes in GPT2.items():
        found = gpt2_efficiency(sizes, Devices(64 * devices, 64, devices), shares)
        known = WEAK_512 if devices == 8 else None
        yield _share_row(f"weak scaling, {_billions(sizes)} on {64 * devices} GPUs", known, found)
    for sizes, (ways, groups, days) in DAYS.items():
        seconds = gpt2_step(sizes, Devices(ways * groups, groups, ways), shares)[0].total
        what = f"seconds per step, {_billions(sizes)} on {ways * groups} GPUs"
        yield what, f"{days * DAY:.2f}", f"{seconds:.2f}", f"{seconds / (days * DAY) - 1:+.1%}"


def _share_row(what: str, published: float | None, predicted: float) -> tuple[str, str, str, str]:
    if published is None:
        return what, "-", f"{predicted:.0%}", "not published in the text"
    return what, f"{published:.0%}", f"{predicted:.0%}", _off(predicted, published, "predicted")


def _off(predicted: float, published: float, note: str) -> str:
    return note if note != "predicted" else f"{predicted / published - 1:+.1%}"


def _billions(sizes: tuple[int, int, int]) -> str:
    return f"{gpt2_trace(*sizes, 1)[2] / 1e9:.1f}B"
