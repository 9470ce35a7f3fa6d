"""GPUs as the planner sees them: memory and links by data sheets, and what share of those rates programs reach."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A GPU and the machine that it is usually in. Rates are those of data sheets.

    Attributes:
        name: as `torch.cuda.get_device_name()` returns it.
        memory: in bytes.
        bandwidth: of its memory, in bytes/s.
        within: bytes/s that it sends to GPUs of the same machine.
        between: bytes/s that a machine sends to other machines, all of its adapters together.
    """

    name: str
    memory: float
    bandwidth: float
    within: float
    between: float


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


# Memory and links by NVIDIA's data sheets; adapters as in the machines that clouds and NVIDIA build around them. The
# network differs from cluster to cluster: `--between` replaces it.
DEVICES = {
    "v100-16": Device("Tesla V100-SXM2-16GB", 16 * GIB, 900e9, 150e9, 12.5e9),  # 8 x 25 Gbit/s shared, 100 in all
    "v100-32": Device("Tesla V100-SXM3-32GB", 32 * GIB, 980e9, 150e9, 100e9),  # DGX-2H: 8 x 100 Gbit/s
    "a100-40": Device("NVIDIA A100-SXM4-40GB", 40 * GIB, 1555e9, 300e9, 50e9),  # 4 x 100 Gbit/s
    "a100-80": Device("NVIDIA A100-SXM4-80GB", 80 * GIB, 2039e9, 300e9, 200e9),  # 8 x 200 Gbit/s
    "h100": Device("NVIDIA H100 80GB HBM3", 80 * GIB, 3350e9, 450e9, 400e9),  # 8 x 400 Gbit/s
    "h200": Device("NVIDIA H200", 141e9, 4800e9, 450e9, 400e9),
    "b200": Device("NVIDIA B200", 180e9, 8000e9, 900e9, 400e9),
    "l40s": Device("NVIDIA L40S", 48e9, 864e9, 32e9, 50e9),  # PCIe 4
    "4090": Device("NVIDIA GeForce RTX 4090", 24 * GIB, 1008e9, 32e9, 12.5e9),
}

# Fitted by benchmarks/published.py on three published rates of training Stable Diffusion 2 on A100s: `compute` and
# `gap` on 8 GPUs at 256 and at 512, `links` on 128 GPUs at 256. `memory` is assumed. docs/planning.md compares other
# published rates with what follows. For other GPUs than the A100 these shares are a guess.
SHARES = Shares(compute=0.35, memory=0.8, links=0.58, gap=8e-6)


def device_named(name: str) -> Device:
    """A device of the table.

    Raises:
        ValueError: it is not in the table.
    """
    if name not in DEVICES:
        raise ValueError(f"--gpu {name}: not in the table (recipes/planning/gpus.py); give {', '.join(DEVICES)}")
    return DEVICES[name]
