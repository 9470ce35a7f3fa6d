"""Checks of what lies between the processes of a run: their clocks and the links of their devices."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from data.cost import FLOAT, size_text
from data.own_gpu import check_own_gpu
from data.system.process_groups import leave
from recipes.checking.finding import Finding
from recipes.planning.hardware.link_rate import WORDS, all_reduce_rate

# Clocks that differ by more than this confuse logs, and certificates and tokens of object stores.
CLOCKS = 1.0  # seconds


def link_checks(own: list[Finding]) -> Iterator[Finding]:
    """What was found on other machines, the clocks of all processes, and the rate of an all-reduce over them.

    Nothing if there is one process. Every process must call it; all are given the same.

    Args:
        own: what this process has found, of which others are told.

    Raises:
        ValueError: there are more processes than GPUs on this machine.
    """
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1:
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        check_own_gpu("links")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    try:
        # gloo on all: a machine that has lost its GPU must be able to say so.
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    except (RuntimeError, ValueError) as error:  # torch.distributed's own errors are RuntimeErrors
        yield unreachable(own, str(error).splitlines()[0])
        return
    try:
        told: list = [None] * world
        dist.all_gather_object(told, (platform.node(), on_gpu, own))
        yield from of_other_machines([(host, findings) for host, _, findings in told])
        if len({has for _, has, _ in told}) > 1:
            without = sorted({host for host, has, _ in told if not has})
            yield Finding("error", "links", f"{', '.join(without)}: no GPU that torch can use, and others have one")
            return
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        yield clocks(device)
        yield bandwidth(device)
    finally:
        leave()


def of_other_machines(told: list[tuple[str, list[Finding]]]) -> Iterator[Finding]:
    """What is wrong on machines other than the first rank's, each once, with the names of the machines; and errors that
    other processes of that machine have found, whose GPUs are other ones.

    Args:
        told: of each rank, in order: the name of its machine, and what it has found.
    """
    first = told[0][0]
    here = {finding for host, findings in told if host == first for finding in findings}
    found: dict[Finding, dict[str, None]] = {}
    for host, findings in told:
        for finding in findings:
            elsewhere = host != first and finding.level != "ok" and finding not in here
            if elsewhere or host == first and finding.level == "error" and finding not in told[0][1]:
                found.setdefault(finding, {})[host] = None
    for finding, hosts in found.items():
        yield dataclasses.replace(finding, text=f"on {', '.join(hosts)}: {finding.text}")


def unreachable(own: list[Finding], reason: str) -> Finding:
    """The processes do not reach each other, so that each machine's first one says itself what is wrong there."""
    host = platform.node()
    if os.environ.get("RANK") != "0" and os.environ.get("LOCAL_RANK") == "0":
        for finding in own:
            if finding.level == "error":
                print(dataclasses.replace(finding, text=f"on {host}: {finding.text}"), flush=True)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return Finding("error", "links", f"{host} does not reach the other processes at {address} ({reason})")


def clocks(device: torch.device) -> Finding:
    """How far the clocks of the machines differ, up to the time that a barrier takes."""
    times = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    dist.barrier()
    times[dist.get_rank()] = time.time()
    dist.all_reduce(times)
    difference = (times.max() - times.min()).item()
    if difference > CLOCKS:
        late = int(times.argmin())
        return Finding(
            "warning", "clocks", f"differ by {difference:.1f} s; rank {late} is last: synchronise them (chrony or ntpd)"
        )
    return Finding("ok", "clocks", f"differ by less than {difference + 0.05:.1f} s")


def bandwidth(device: torch.device) -> Finding:
    """The rate of an all-reduce, as the bytes that each device sends per second in a ring."""
    world, rate = dist.get_world_size(), all_reduce_rate(device)
    if rate is None:
        return Finding("error", "links", f"an all-reduce over {world} ranks gives wrong sums: check cables and memory")
    size = size_text(FLOAT * WORDS)
    return Finding("ok", "links", f"{size_text(rate)}/s per device in an all-reduce of {size} over {world} ranks")
