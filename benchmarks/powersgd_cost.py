"""Computation of PowerSGD per step, compared with the backward pass of the same layer.

    python benchmarks/powersgd_cost.py                 # d = 512 on a CPU; the published widths and ranks on a GPU
    python benchmarks/powersgd_cost.py --widths 3968 --ranks 896 --batch 4

One layer of Ramesh et al. 2021. A machine has m devices, and each compresses its shard of every matrix with 1/m of the
rank: d x d/m of q, k, v and the output projection, d x 4d/m and 4d/m x d of the MLP. The backward pass is that of the
whole layer, on the device's samples of 1,280 positions, in bfloat16 on a GPU. The process group has one member, so the
times include rounding to 1-6-9 and back, but no communication. Alternatives take turns; times are medians.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.timing import times, training_device
from data.system.log import log
from recipes.algorithms.powersgd.all_reduce import all_reduce_sum
from recipes.algorithms.powersgd.low_rank import LowRank
from recipes.algorithms.powersgd.orthogonal import cholesky_qr, householder
from recipes.models.autoregressive.masks import TokenLayout
from recipes.models.autoregressive.sparse_attention import make_attend
from recipes.models.autoregressive.transformer import MLP, CausalAttention, Residual

LAYOUT = TokenLayout(256, 32, 11)


def published_shard_shapes(width: int, shards: int) -> list[torch.Size]:
    """Shapes of one device's shards of the matrices of a layer, as published (Ramesh et al. 2021, appendix E)."""
    inner = 4 * width // shards
    return [torch.Size(shape) for shape in [(width, width // shards)] * 4 + [(width, inner), (inner, width)]]


def backward(width: int, batch: int, device: torch.device) -> Callable[[], None]:
    """A function that runs the backward pass of an attention block with the row mask and of an MLP block."""
    with device:
        blocks = [Residual(CausalAttention(width, width // 64)), Residual(MLP(width))]
        x = torch.randn(batch, LAYOUT.length, width, requires_grad=True)
        slope = torch.randn(batch, LAYOUT.length, width)
    attend = make_attend("auto", "row", LAYOUT, device, 64)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        y = blocks[1](blocks[0](x, attend))
    wanted = [x, *(p for block in blocks for p in block.parameters())]
    return lambda: torch.autograd.grad(y, wanted, slope, retain_graph=True) and None


def works(width: int, rank: int, options: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The timed functions by name; the first five are parts of "compress and finish"."""
    compressor = LowRank(rank // options.shards)
    shapes = published_shard_shapes(width, options.shards)
    state = compressor.new_state(shapes, device, 0)
    gradients = [torch.randn(shape, device=device) * 1e-4 for shape in shapes]
    terms = [g if g.shape[0] <= g.shape[1] else g.T for g in gradients]
    group, sent = dist.group.WORLD, torch.tensor(True, device=device)
    block = compressor.compress([g.clone() for g in gradients], 1.0, state, group)
    thin = [[e @ q for e, q in zip(terms, state.projections, strict=True)], block.factors]

    def wire() -> None:
        for matrices in thin:
            all_reduce_sum(torch.cat([m.flatten() for m in matrices]), group, compressor.wire)

    def whole() -> None:
        made = compressor.compress(gradients, 1.0, state, group)
        compressor.finish(made, sent, state, 1)

    return {
        "P = E Q": lambda: [e @ q for e, q in zip(terms, state.projections, strict=True)],
        "orthogonalise": lambda: cholesky_qr(thin[0]) if device.type == "cuda" else householder(thin[0]),
        "Q' = E^T P": lambda: [e.T @ p for e, p in zip(terms, block.bases, strict=True)],
        "to 1-6-9 and back": wire,
        "finish": lambda: compressor.finish(block, sent, state, 1),
        "compress and finish": whole,
        "by Householder reflections": lambda: householder(thin[0]),
        "by Cholesky factors": lambda: cholesky_qr(thin[0]),
        "backward pass": backward(width, options.batch, device),
    }


def measure(width: int, rank: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One row of the table: times in milliseconds."""
    done = works(width, rank, options, device)
    seconds = times(done, options.rounds, device.type == "cuda")
    everything = seconds["compress and finish"]
    named = ("P = E Q", "orthogonalise", "Q' = E^T P", "to 1-6-9 and back", "finish")
    other = everything - sum(seconds[name] for name in named)
    found = {name: round(1e3 * seconds[name], 3) for name in named}
    return {
        "width": width,
        "rank": f"{rank} ({rank // options.shards} per shard)",
        **found,
        "other": round(1e3 * other, 3),
        "compress and finish": round(1e3 * everything, 3),
        "Householder / Cholesky": round(seconds["by Householder reflections"] / seconds["by Cholesky factors"], 2),
        "backward pass": round(1e3 * seconds["backward pass"], 3),
        "relative to backward pass": round(everything / seconds["backward pass"], 3),
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    device = training_device()
    gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=positive, nargs="+", default=[1920, 2688, 3968] if gpu else [512])
    ranks = [512, 640, 896] if gpu else [128]
    parser.add_argument("--ranks", type=positive, nargs="+", default=ranks, help="one rank per width")
    parser.add_argument("--shards", type=positive, default=8, help="devices per machine")
    parser.add_argument("--batch", type=positive, default=8 if gpu else 1, help="samples per device")
    parser.add_argument("--rounds", type=positive, default=50 if gpu else 10)
    options = parser.parse_args(arguments)
    if len(options.widths) != len(options.ranks):
        parser.error(f"--ranks: {len(options.ranks)} for {len(options.widths)} widths; give one rank per width")
    wrong = [w for w in options.widths if w % 64 or w % options.shards]
    if wrong:
        parser.error(f"--widths: {wrong[0]} is not a multiple of 64 (the size of a head) and {options.shards} shards")
    few = [r for r in options.ranks if r < options.shards]
    if few:
        parser.error(f"--ranks: {few[0]} leaves no rank to each of {options.shards} shards; give that or more")
    torch.manual_seed(0)
    started = not dist.is_initialized()
    if started:
        backend, address = "nccl" if gpu else "gloo", f"tcp://127.0.0.1:{get_free_port()}"
        dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    rows = []
    for width, rank in zip(options.widths, options.ranks, strict=True):
        rows.append(measure(width, rank, options, device))
        log.info(rows[-1])
    if started:
        dist.destroy_process_group()
    note = (
        f"Milliseconds of one layer on one of {options.shards} devices, {options.batch} sample(s) of {LAYOUT.length:,} "
        f"positions; medians of {options.rounds} rounds. P is orthogonalised by Cholesky factors on a GPU and by "
        "Householder reflections on a CPU; a column has the ratio of their times. The time of the compression does not "
        "depend on the batch; that of the backward pass is proportional to it. Other: decoding and adding the errors, "
        "and checking for values that are not finite." + ("" if gpu else f" {torch.get_num_threads()} thread(s).")
    )
    write_results(
        "powersgd_cost", "published" if gpu and 3968 in options.widths else f"d{options.widths[-1]}", rows, note
    )
    return rows


if __name__ == "__main__":
    main()
