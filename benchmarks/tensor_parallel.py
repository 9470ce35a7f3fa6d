"""Time of a transformer's forward and backward pass when its matrices are divided over 1, 2, 4, ... devices.

    torchrun --nproc_per_node 2 benchmarks/tensor_parallel.py           # two CPU processes of one thread
    torchrun --nproc_per_node 8 benchmarks/tensor_parallel.py           # eight GPUs
    python benchmarks/tensor_parallel.py                                # what dividing over one device costs

Strong scaling: the same model on more devices. Weak scaling: as many layers more as devices, so that each device has as
many parameters. Alternatives take turns; devices that an alternative does not use wait. Shoeybi et al. (2019, section
5.1) report 1.64, 2.34 and 2.98 times the speed on 2, 4 and 8 GPUs for their model of 1.2 billion parameters, and 77% of
linear weak scaling on 8.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.timing import times, training_device
from data.cost import FLOAT
from data.system.process_groups import leave
from recipes.algorithms.tensor_parallel.divide import divide
from recipes.models.autoregressive.task import Autoregressive
from recipes.planning.tensor_parallel import messages, sent_bytes


def start() -> torch.device:
    """Join the launcher's processes, or be the only one."""
    gpu = training_device().type == "cuda"
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    alone = {} if "MASTER_PORT" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    return device


def step(task: Autoregressive, options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """A function that computes losses and gradients of one batch."""
    sizes, generator = task.sizes, torch.Generator().manual_seed(0)
    shapes = {
        "text": (sizes["text_vocabulary"], sizes["text_positions"]),
        "image": (sizes["codes"], sizes["side"] ** 2),
    }
    batch = {
        name: torch.randint(most, (options.batch, count), generator=generator).to(device)
        for name, (most, count) in shapes.items()
    }

    def work() -> None:
        task.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = task(batch)["total"]
        loss.backward()

    return work


def measure(layers: dict[str, int], options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """One row per alternative.

    Args:
        layers: number of devices, or "whole" for a model that is not divided -> layers.
    """
    works, facts = {}, {}
    for name, count in layers.items():
        devices = 1 if name == "whole" else int(name)
        mesh = None if name == "whole" else DeviceMesh(device.type, list(range(devices)))  # all ranks take part
        task = Autoregressive(
            layers=count, width=options.width, heads=options.width // 64, text_positions=options.side**2 // 4,
            side=options.side, text_vocabulary=options.vocabulary, codes=options.vocabulary,
        )  # fmt: skip
        plan = task.tensor_plan()
        low = FLOAT if device.type == "cpu" else 2
        sent = sent_bytes(plan, options.batch, devices, value=low, loss_value=low) if devices > 1 else 0.0
        number = sum(m.count for m in messages(plan, options.batch, devices) if m.what == "branches" and devices > 1)
        facts[name] = sum(p.numel() for p in task.parameters()), number, sent
        if dist.get_rank() >= devices:
            works[name] = dist.barrier
            continue
        if mesh is not None:
            divide(task, plan, mesh, device)
        work = step(task.to(device), options, device)
        works[name] = lambda work=work: (work(), dist.barrier())  # the others wait for the devices that compute
    seconds = times(works, options.rounds, device.type == "cuda")
    base = seconds["1"]
    return [
        {
            "devices": name,
            "layers": count,
            "parameters": f"{facts[name][0]:,}",
            "all-reduces in blocks": facts[name][1],
            "MB sent per device": round(facts[name][2] / 1e6, 1),
            "ms": round(1e3 * seconds[name], 1),
            "relative to 1 device": f"{base / seconds[name]:.2f}",
        }
        for name, count in layers.items()
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=positive, default=1920 if gpu else 256, help="a multiple of 64")
    parser.add_argument("--layers", type=positive, default=12 if gpu else 2)
    parser.add_argument("--side", type=positive, default=32 if gpu else 8, help="of the grid of image tokens")
    parser.add_argument("--vocabulary", type=positive, default=8192 if gpu else 512, help="of text, and of image codes")
    parser.add_argument("--batch", type=positive, default=8, help="samples, the same on all devices")
    parser.add_argument("--rounds", type=positive, default=20 if gpu else 10)
    parser.add_argument("--note", default="", help="a remark for the table, such as other load on the machine")
    options = parser.parse_args(arguments)
    if options.width % 64 or options.side < 2:
        parser.error("--width must be a multiple of 64, --side 2 or more")
    device = start()
    world = dist.get_world_size()
    counts = [n for n in (1, 2, 4, 8) if n <= world and (options.width // 64) % n == 0]
    torch.manual_seed(0)
    rows = []
    strong = measure({"whole": options.layers, **{str(n): options.layers for n in counts}}, options, device)
    rows += [{"scaling": "strong", **row} for row in strong]
    if len(counts) > 1:
        weak = measure({str(n): n * options.layers for n in counts}, options, device)
        rows += [{"scaling": "weak", **row} for row in weak]
    if dist.get_rank() == 0:
        notes = (
            "whole: not divided; 1: divided over one device, which sends nothing. Linear weak scaling would be 1.00. "
            f"{options.batch} samples of {options.side**2 * 5 // 4} tokens. {options.note}"
        )
        write_results("tensor_parallel", f"d{options.width}-{world}devices", rows, notes.strip())
    leave()
    return rows


if __name__ == "__main__":
    main()
