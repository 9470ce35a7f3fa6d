"""Megatron-LM's scaling by the planner: see `benchmarks/published.py`, which prints the rows.

Shoeybi et al. 2019, section 5.1: DGX-2H machines of 16 V100, batches of 8 sequences, recomputation of each layer. Of
the figure of weak scaling, the text repeats the numbers of the largest model only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache

import torch

from benchmarks.common.published_gpt2 import FEW, Gpt2, deepened
from data.cost import all_reduce_bytes
from recipes.planning.devices import Devices
from recipes.planning.hardware.gpus import DEVICES, Shares
from recipes.planning.step_time import UPDATE_BYTES, StepTime, message_seconds, pass_times
from recipes.planning.tensor_parallel import held, keep_part, messages
from recipes.planning.tracing.trace import BYTES, Trace, trace

V100, MACHINE = DEVICES["v100-32"], 16
V100_PEAK = 125e12  # FLOP/s, of recipes/planning/hardware/peak_flops.py; the paper's machines are clocked up to 130e12
SEQUENCES = 8
# Table 1: layers, width, heads -> GPUs.
GPT2 = {1: (40, 1536, 16), 2: (54, 1920, 20), 4: (64, 2304, 24), 8: (72, 3072, 32)}
BASELINE = 39e12  # FLOP/s on one GPU, of all products that run; `compute` is fitted on it
STRONG = {2: 1.64, 4: 2.34, 8: 2.98}  # table 3; `REST` is fitted on the first
# Table 2, 8.3 billion parameters on 8 GPUs: heads -> efficiency. `links` is fitted on one. Table 1 has 32 heads.
HEADS, FITTED_HEADS = {16: 0.82, 24: 0.80, 32: 0.77}, 16
LARGEST = {heads: (72, 3072, heads) for heads in HEADS}
# Heads -> efficiency on 512 GPUs: by the abstract, of the model that was trained, and by section 5.1.
WEAK_512 = {24: 0.76, 32: 0.74}
# Table 4: layers, width, heads -> devices that divide matrices, groups of them, days for 68,507 steps.
DAYS = {(24, 1024, 16): (1, 64, 0.86), (54, 1920, 20): (2, 64, 2.27), (72, 3072, 24): (8, 64, 2.10)}
DAY = 86400 / 68507  # seconds per step of an epoch that takes a day
# Seconds of each step that are in no operation of the model, fitted: data, loss scaling, loops over tensors in the
# update. More GPUs do not divide them.
REST = 0.236
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


def gpt2_step(
    sizes: tuple[int, int, int], devices: Devices, shares: Shares, rest: float = REST
) -> tuple[StepTime, float]:
    """A step of Megatron, and the FLOPs of its matrix products on each GPU, recomputed ones included.

    Args:
        sizes: layers, width and heads.
        devices: of the run.
        shares: reached.
        rest: seconds of each step outside of both passes and the update.
    """
    found, own, _, (count, values) = gpt2_trace(*sizes, devices.tensor)
    compute, traffic, gaps = pass_times(found, V100, V100_PEAK, shares, recompute=True)
    update = rest + UPDATE_BYTES * own / (shares.memory * V100.bandwidth)
    averaged = message_seconds(0, all_reduce_bytes(BYTES * own, devices.replicas), devices, MACHINE, V100, shares)
    exposed = 0.0
    if devices.tensor > 1:
        rate = shares.links * V100.within
        exposed = REPEATED * count * (all_reduce_bytes(BYTES * values, devices.tensor) / rate + shares.gap)
    work = sum(operation.flops for operation in found.executed(recompute=True))
    return StepTime(compute, traffic, update, gaps, averaged, 0.0, exposed), work


def gpt2_efficiency(sizes: tuple[int, int, int], devices: Devices, shares: Shares, rest: float = REST) -> float:
    """FLOP/s of each GPU as a share of those of one GPU with the smallest model."""
    one, smallest = gpt2_step(GPT2[1], Devices(1, 1), shares, rest)
    time, work = gpt2_step(sizes, devices, shares, rest)
    return work / smallest * one.total / time.total


def speed_up(devices: int, shares: Shares, rest: float = REST) -> float:
    """How much faster a step of the smallest model is on several devices, with the same batch."""
    steps = [gpt2_step(GPT2[1], Devices(n, 1, n), shares, rest)[0].total for n in (1, devices)]
    return steps[0] / steps[1]


def fitted_v100(assumed: Shares) -> tuple[Shares, float]:
    """`compute`, `links` and `REST` that reproduce the rate of one GPU, the speed-up on two, and the efficiency of 16
    heads; `memory` and `gap` are kept.

    Speed-ups of one model cannot tell messages from what is not divided: in a ring, both leave (n - 1) / n of a
    constant. Another model has other messages, and as much of the rest.
    """

    def rest_of(shares: Shares) -> float:
        time, work = gpt2_step(GPT2[1], Devices(1, 1), shares, 0.0)
        return work / BASELINE - time.total

    def computing(links: float) -> Shares:
        def excess(compute: float) -> float:
            shares = dataclasses.replace(assumed, compute=compute, links=links)
            return speed_up(2, shares, rest_of(shares)) - STRONG[2]

        return dataclasses.replace(assumed, compute=_solved(excess), links=links)

    def missing(links: float) -> float:
        shares = computing(links)
        return HEADS[FITTED_HEADS] - gpt2_efficiency(LARGEST[FITTED_HEADS], Devices(8, 1, 8), shares, rest_of(shares))

    shares = computing(_solved(missing))
    return shares, rest_of(shares)


def _solved(excess: Callable[[float], float]) -> float:
    """The share at which a function that falls with it is 0."""
    low, high = 0.05, 1.0
    if excess(low) * excess(high) > 0:
        raise ValueError("no share between 5% and 100% gives the published number")
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def megatron_rows(shares: Shares) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table: a figure, its published and its predicted value, and their difference or what was fitted."""
    one, work = gpt2_step(GPT2[1], Devices(1, 1), shares)
    rate = work / one.total
    yield "TFLOP/s, 1.2B on 1 GPU", f"{BASELINE / 1e12:.0f}", f"{rate / 1e12:.1f}", "fitted: compute"
    for devices, published in STRONG.items():
        note = "fitted: rest" if devices == 2 else "predicted"
        predicted = speed_up(devices, shares)
        off = _off(predicted, published, note)
        yield f"speed-up of 1.2B on {devices} GPUs", f"{published:.2f}", f"{predicted:.2f}", off
    for devices in (2, 4):
        found = gpt2_efficiency(GPT2[devices], Devices(devices, 1, devices), shares)
        yield _share_row(f"weak scaling, {_billions(GPT2[devices])} on {devices} GPUs", None, found)
    for heads, published in HEADS.items():
        found = gpt2_efficiency(LARGEST[heads], Devices(8, 1, 8), shares)
        note = "fitted: links" if heads == FITTED_HEADS else "predicted"
        yield _share_row(f"weak scaling, 8.3B with {heads} heads on 8 GPUs", published, found, note)
    for devices in (1, 2, 4):
        found = gpt2_efficiency(GPT2[devices], Devices(64 * devices, 64, devices), shares)
        yield _share_row(f"weak scaling, {_billions(GPT2[devices])} on {64 * devices} GPUs", None, found)
    for heads, published in WEAK_512.items():
        found = gpt2_efficiency(LARGEST[heads], Devices(512, 64, 8), shares)
        yield _share_row(f"weak scaling, 8.3B with {heads} heads on 512 GPUs", published, found)
    for sizes, (ways, groups, days) in DAYS.items():
        seconds = gpt2_step(sizes, Devices(ways * groups, groups, ways), shares)[0].total
        what = f"seconds per step, {_billions(sizes)} on {ways * groups} GPUs"
        yield what, f"{days * DAY:.2f}", f"{seconds:.2f}", f"{seconds / (days * DAY) - 1:+.1%}"


def _share_row(
    what: str, published: float | None, predicted: float, note: str = "predicted"
) -> tuple[str, str, str, str]:
    if published is None:
        return what, "-", f"{predicted:.0%}", "not published in the text"
    return what, f"{published:.0%}", f"{predicted:.0%}", _off(predicted, published, note)


def _off(predicted: float, published: float, note: str) -> str:
    return note if note != "predicted" else f"{predicted / published - 1:+.1%}"


def _billions(sizes: tuple[int, int, int]) -> str:
    return f"{gpt2_trace(*sizes, 1)[2] / 1e9:.1f}B"
