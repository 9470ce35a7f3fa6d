"""Time and memory traffic of GroupNorm and SiLU at every shape of Stable Diffusion 2's U-Net, by implementation.

    python benchmarks/norms.py                            # small shapes on a CPU, the 256 x 256 ones on a GPU
    python benchmarks/norms.py --size sd2_512 --batch 96
    python benchmarks/norms.py --tune                     # the fused kernels with other tile sizes and splits

Each implementation maps an input in the autocast dtype to an output in that dtype, in the memory format of the
surrounding network, forward and backward. Casts and copies between memory formats that PyTorch's norm causes in
neighbouring layers are therefore included.
"""

import argparse
import importlib.util
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from composer.algorithms.low_precision_groupnorm.low_precision_groupnorm import LPGroupNorm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.options import positive
from benchmarks.common.reporting import reason, write_results
from benchmarks.common.timing import milliseconds, training_device
from benchmarks.common.wide_norms import GroupNorm32
from data.system.log import log
from recipes.algorithms.modules.fused_group_norm import fuse_group_norms
from recipes.algorithms.modules.low_precision_norms import LowPrecisionGroupNorm
from recipes.models.kernels import group_norm_silu as fused
from recipes.models.kernels.fused_norm import FusedGroupNorm, fuse
from recipes.models.kernels.group_norm_kernels import make_plan
from recipes.models.latent_diffusion.unet import unet

LEVELS = {"attention": [True, True, True, False]}
SD2 = LEVELS | {"channels": [320, 640, 1280, 1280], "heads": [5, 10, 20, 20], "text_width": 1024}
SMALL = LEVELS | {"channels": [32, 64, 64, 64], "heads": [1, 2, 2, 2], "text_width": 16, "norm_groups": 8, "blocks": 1}
# Name -> arguments of the U-Net, side of its latents, batch size.
SIZES = {"small": (SMALL, 16, 4), "sd2": (SD2, 32, 64), "sd2_512": (SD2, 64, 32)}
DTYPE = torch.bfloat16
NOTES = """\
Median times of forward and backward pass in milliseconds; `all` is the sum over the norms of the network that
the table has. GB/s and `of copy` take the smallest possible traffic of both passes (input, output; input, gradient,
gradient of the input; 16 bits each) and compare it with a copy of a large tensor on the same device. A shape is
measured on the same tensors again and again, which the caches hold if they are small. `kept MB`: saved for the
backward pass. `moved`: bytes that the operators read and write, as a multiple of the smallest possible traffic; for the
fused kernels, every input is counted as read twice."""


Shape = tuple[int, int, int, bool]  # channels, height, width, whether SiLU follows


def norm_shapes(config: dict[str, Any], side: int) -> Counter[Shape]:
    """Shape of every norm that can be fused -> number of such norms, from a forward pass on the meta device."""
    counts: Counter[Shape] = Counter()
    with torch.device("meta"), torch.no_grad():
        network = unet(**config)
        fuse_group_norms(network, measured=False)
        for module in network.modules():
            if isinstance(module, FusedGroupNorm):
                module.register_forward_pre_hook(
                    lambda module, args: counts.update([(*args[0].shape[1:], module.silu)])
                )
        latents, text = torch.empty(1, 4, side, side), torch.empty(1, 2, config["text_width"])
        network(latents, torch.empty(1, dtype=torch.long), text)
    return counts


def ways(on_gpu: bool, tune: bool) -> dict[str, Callable[[int, int, bool, torch.device], Callable[[Tensor], Tensor]]]:
    """Name -> a factory: (channels, groups, whether SiLU follows, device) -> a function of tensors (N, C, H, W)."""

    def of(kind: type[nn.GroupNorm], compiled: bool = False):
        def make(channels: int, groups: int, silu: bool, device: torch.device):
            norm = kind(groups, channels, device=device)
            torch._dynamo.reset()  # otherwise the limit of recompilations would be reached

            def function(x: Tensor) -> Tensor:
                y = norm(x)
                return (F.silu(y) if silu else y).to(DTYPE)

            return torch.compile(function, dynamic=False) if compiled else function

        return make

    def kernel(**options: int):
        def make(channels: int, groups: int, silu: bool, device: torch.device):
            norm = nn.GroupNorm(groups, channels, device=device)
            fuse(norm, silu, measured=False)

            def plan_for(x: Tensor, groups: int):
                processors = torch.cuda.get_device_properties(x.device).multi_processor_count
                return make_plan(x.shape[0], x.shape[2] * x.shape[3], x.shape[1], groups, processors, **options)

            def function(x: Tensor) -> Tensor:
                fused.plan_for = plan_for
                return norm(x)

            return function

        return make

    if tune:
        grid = itertools.product((2048, 4096, 8192), (64, 128), (2, 4, 8))
        return {
            f"fused, tile {t}, width {w}, programs {p}": kernel(tile=t, width=w, programs=p) for t, w, p in grid
        } | {"fused, no splits": kernel(splits=1)}
    found = {
        "32 bits, contiguous": of(GroupNorm32),
        "32 bits, channels_last": of(GroupNorm32),
        "low precision, channels_last": of(LowPrecisionGroupNorm),
        "low precision, compiled": of(LowPrecisionGroupNorm, compiled=True),
    }
    if on_gpu:
        found["Composer's low precision, channels_last"] = of(LPGroupNorm)
        found["fused, channels_last"] = kernel()
        if importlib.util.find_spec("apex"):
            found["apex, channels_last"] = apex
    return found


def apex(channels: int, groups: int, silu: bool, device: torch.device) -> Callable[[Tensor], Tensor]:
    """NVIDIA's kernels for channels_last, where its package is installed."""
    from apex.contrib.group_norm import GroupNorm

    return GroupNorm(groups, channels, act="silu" if silu else "", device=device, dtype=DTYPE)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write, without views and uninitialised memory."""

    FREE = {"aten::empty_like", "aten::empty", "aten::empty_strided", "aten::detach", "aten::new_empty"}

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in self.FREE:
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, result)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def copy_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second that a copy of a large tensor reads and writes."""
    source = torch.ones(2**28, dtype=torch.uint8, device=device)  # larger than caches
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), seconds, device) * 1e3


def measure(name: str, make: Callable, shape: Shape, groups: int, batch: int, seconds: float, device: torch.device):
    """Forward ms, forward and backward ms, bytes kept for the backward pass, and moved bytes or None."""
    channels, height, width, silu = shape
    memory_format = torch.contiguous_format if "contiguous" in name else torch.channels_last
    size = (batch, channels, height, width)
    x, dy = (torch.randn(size, device=device, dtype=DTYPE).contiguous(memory_format=memory_format) for _ in range(2))
    x.requires_grad_()
    function = make(channels, groups, silu, device)

    def forward() -> Tensor:
        with torch.autocast(device.type, DTYPE):
            return function(x).contiguous(memory_format=memory_format)

    def both() -> None:
        torch.autograd.grad(forward(), x, dy)[0].contiguous(memory_format=memory_format)

    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    both()  # compile before the hooks are set
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = forward()
    del y
    moved = None
    if "compiled" not in name and "fused" not in name:
        with Traffic() as traffic:
            both()
        moved = traffic.bytes
    elif "fused" in name:
        moved = 8 * x.numel() * x.element_size()
    return milliseconds(forward, seconds, device), milliseconds(both, seconds, device), sum(kept.values()), moved


def row(way: str, shape: str, count: int, values: tuple, least: float, rate: float) -> dict[str, Any]:
    """A row of the table."""
    forward, both, kept, moved = values
    reached = least / (both / 1e3)
    return {
        "shape": shape,
        "count": count,
        "way": way,
        "forward ms": round(forward, 4),
        "backward ms": round(both - forward, 4),
        "GB/s": round(reached / 1e9, 1),
        "of copy": f"{reached / rate:.0%}",
        "kept MB": round(kept / 1e6, 2),
        "moved": "" if moved is None else f"{moved / least:.1f}x",
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="small on a CPU, sd2 on a GPU")
    parser.add_argument("--batch", type=positive, help="batch size")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per measurement")
    parser.add_argument(
        "--most", type=positive, metavar="N", help="only the N shapes with most of the network's traffic"
    )
    parser.add_argument("--tune", action="store_true", help="only the fused kernels, with other tile sizes and splits")
    arguments = parser.parse_args(words)
    device = training_device()
    if arguments.tune and device.type == "cpu":
        parser.error("--tune: the kernels need a GPU")
    size = arguments.size or ("sd2" if device.type == "cuda" else "small")
    config, side, batch = SIZES[size]
    batch = arguments.batch or batch
    rate = copy_rate(device, arguments.seconds)
    shapes = norm_shapes(config, side)
    if arguments.most:
        by_traffic = sorted(shapes, key=lambda shape: -shapes[shape] * shape[0] * shape[1] * shape[2])
        shapes = Counter({shape: shapes[shape] for shape in by_traffic[: arguments.most]})
    rows, totals = [], []
    for way, make in ways(device.type == "cuda", arguments.tune).items():
        lines = []
        for shape, count in sorted(shapes.items(), key=lambda item: (-item[0][1], item[0])):
            least = 5 * batch * shape[0] * shape[1] * shape[2] * DTYPE.itemsize
            try:
                values = measure(way, make, shape, config.get("norm_groups", 32), batch, arguments.seconds, device)
            except Exception as error:  # a compiler, or a package that some machines have; others still count
                log.info(f"{way}: does not run here ({reason(error)})")
                totals.append({"shape": "all", "count": shapes.total(), "way": way, "forward ms": reason(error)})
                break
            lines.append((shape, count, values, least))
        else:
            for shape, count, values, least in lines:
                name = f"{batch}x{shape[0]}x{shape[1]}x{shape[2]}{'' if shape[3] else ' without SiLU'}"
                rows.append(row(way, name, count, values, least, rate))
            columns = zip(*(line[2] for line in lines), strict=True)
            weights = [line[1] for line in lines]
            sums = [
                None if None in column else sum(w * v for w, v in zip(weights, column, strict=True))
                for column in columns
            ]
            totals.append(row(way, "all", sum(weights), tuple(sums), sum(n * b for _, n, _, b in lines), rate))
            log.info(f"{way}: {sums[1]:.2f} ms for all {sum(weights)} norms")
    notes = f"{NOTES} The copy: {rate / 1e9:.0f} GB/s. {DTYPE} autocast, batch size {batch}."
    write_results("norms-tune" if arguments.tune else "norms", size, totals + rows, notes)


if __name__ == "__main__":
    main()
