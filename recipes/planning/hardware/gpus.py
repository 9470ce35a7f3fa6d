"""GPUs as the planner sees them: memory and links by data sheets, and what share of those rates programs reach."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.system.files import read_object, write_json

GIB = 1 << 30
FORMATS = {"fp32", "tf32", "bf16", "fp16"}  # of numbers, in which products are measured
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


@dataclass(frozen=True)
class Shares:
    """What share of a data sheet's rate is reached.

    Attributes:
        compute: of the peak, in matrix products, convolutions and attention.
        memory: of the bandwidth of a GPU's memory.
        links: of the links within and between machines.
        gap: seconds that each operation takes besides, for its launch and for the part of the GPU that it leaves idle.
    """

    compute: float
    memory: float
    links: float
    gap: float


# Fitted by benchmarks/published.py on three published rates of training Stable Diffusion 2 on A100s: `compute` and
# `gap` on 8 GPUs at 256 and at 512, `links` on 128 GPUs at 256. `memory` is assumed. docs/planning.md compares other
# published rates with what follows. For GPUs with no shares of their own, these are a guess.
SHARES = Shares(compute=0.354, memory=0.8, links=0.584, gap=11.3e-6)
# Fitted there, too, on three figures of Megatron-LM: the rate of one GPU, the speed-up on two, and the efficiency of
# the largest model with 16 heads on eight.
V100_SHARES = dataclasses.replace(SHARES, compute=0.53, links=0.569)


@dataclass(frozen=True)
class Device:
    """A GPU and the machine that it is usually in. Rates are those of data sheets, or measured.

    Attributes:
        name: as `torch.cuda.get_device_name()` returns it.
        memory: in bytes.
        bandwidth: of its memory, in bytes/s.
        within: bytes/s that it sends to GPUs of the same machine; None: not known.
        between: bytes/s that a machine sends to other machines, all of its adapters together; None: not known.
        shares: of these rates that are reached.
        peaks: FLOP/s of matrix products by number format, where they were measured; None: those of the data sheet.
    """

    name: str
    memory: float
    bandwidth: float
    within: float | None
    between: float | None
    shares: Shares = SHARES
    peaks: dict[str, float] | None = None


# Memory and links by NVIDIA's data sheets; adapters as in the machines that clouds and NVIDIA build around them. The
# network differs from cluster to cluster: `--between` replaces it.
DEVICES = {
    "v100-16": Device(
        "Tesla V100-SXM2-16GB", 16 * GIB, 900e9, 150e9, 12.5e9, V100_SHARES
    ),  # 8 x 25 Gbit/s shared, 100 in all
    "v100-32": Device("Tesla V100-SXM3-32GB", 32 * GIB, 980e9, 150e9, 100e9, V100_SHARES),  # DGX-2H: 8 x 100 Gbit/s
    "a100-40": Device("NVIDIA A100-SXM4-40GB", 40 * GIB, 1555e9, 300e9, 50e9),  # 4 x 100 Gbit/s
    "a100-80": Device("NVIDIA A100-SXM4-80GB", 80 * GIB, 2039e9, 300e9, 200e9),  # 8 x 200 Gbit/s
    "h100": Device("NVIDIA H100 80GB HBM3", 80 * GIB, 3350e9, 450e9, 400e9),  # 8 x 400 Gbit/s
    "h200": Device("NVIDIA H200", 141e9, 4800e9, 450e9, 400e9),
    "b200": Device("NVIDIA B200", 180e9, 8000e9, 900e9, 400e9),
    "l40s": Device("NVIDIA L40S", 48e9, 864e9, 32e9, 50e9),  # PCIe 4
    "4090": Device("NVIDIA GeForce RTX 4090", 24 * GIB, 1008e9, 32e9, 12.5e9),
}


def device_named(name: str, folder: Path) -> Device:
    """A device of the table, or one that was measured.

    Args:
        name: of the device.
        folder: of the files that `write_device` writes.

    Raises:
        ValueError: there is no such device, or its file is damaged.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = folder / f"{name}.json"
    if not re.fullmatch(NAME, name) or not path.is_file():
        measured = sorted(file.stem for file in folder.glob("*.json"))
        known = ", ".join([*DEVICES, *measured])
        raise ValueError(f"--gpu {name}: give {known}; or measure this machine with --calibrate NAME")
    try:
        values = read_object(path)["device"]
        device = Device(**values | {"shares": Shares(**values["shares"])})
        numbers = [device.memory, device.bandwidth, *device.peaks.values(), *dataclasses.astuple(device.shares)]
        numbers += [rate for rate in (device.within, device.between) if rate is not None]
        if not all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers):
            raise ValueError("a rate is not a number above 0")
        if not device.peaks.keys() <= FORMATS:  # for one that is missing, plans would take the rate of another
            raise ValueError(f"it has rates of {', '.join(device.peaks)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = str(error).replace("\n", " ")
        raise ValueError(f"{path}: damaged ({problem}); delete it and measure again with --calibrate {name}") from None
    return device


def write_device(name: str, device: Device, circumstances: dict[str, Any], folder: Path) -> Path:
    """Store a measured device, so that plans can name it. Gives the path of its file.

    Raises:
        ValueError: a name that is no file name, or is one of the table.
    """
    check_name(name)
    path = folder / f"{name}.json"
    write_json(path, {"device": dataclasses.asdict(device), "measured": circumstances}, indent=1)
    return path


def check_name(name: str) -> None:
    """Raises ValueError for a name that a measured device cannot have."""
    if name in DEVICES:
        raise ValueError(f"--calibrate {name}: the table has a device of this name; give another one")
    if not re.fullmatch(NAME, name):
        raise ValueError(f"--calibrate {name}: give a name of letters, digits and _ . - only")
