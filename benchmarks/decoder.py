"""DALL-E's transformer: sparse attention compared with dense, sampling with and without a cache.

    python benchmarks/decoder.py                          # both parts: a small model on a CPU, 1.3 billion on a GPU
    python benchmarks/decoder.py --parts attention

Goals on one H200 in bf16: sparse layers at least 1.5 times as fast as dense causal ones at 1,280 positions, cached
sampling at least 20 times as fast as uncached at 1,024 image tokens. Uncached sampling computes all positions of the
sequence for each token, those that are not drawn yet included. Training is measured by `benchmarks/gpu.py`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from torch import Tensor, nn

from benchmarks.common.flex_blocks import NARROW, block_share, narrow_attend
from benchmarks.common.options import positive
from benchmarks.common.reporting import keep_results, reason, write_results
from benchmarks.common.timing import gpu_seconds, training_device
from recipes.models.autoregressive.flex import BLOCK
from recipes.models.autoregressive.masks import Kind, TokenLayout, visible_pairs
from recipes.models.autoregressive.sampler import Choice, sample_tokens, uniforms
from recipes.models.autoregressive.sparse_attention import make_attend
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.kernels.device_graph import DeviceGraph, has_graphs, memory_pool

GRID = {"text_positions": 256, "side": 32, "kernel": 11}
SIZES = {
    "tiny": {"layers": 1, "width": 32, "heads": 1, "text_vocabulary": 280, "codes": 32},  # to see whether it runs
    "small": {"layers": 4, "width": 256, "heads": 4, "text_vocabulary": 2048, "codes": 1024},
    "1b": {"layers": 24, "width": 2048, "heads": 32, "text_vocabulary": 16384, "codes": 8192},  # yamls/dalle_1b.yaml
}
KINDS: tuple[Kind, ...] = ("row", "column", "convolution")
DENSE = ("dense causal", "sdpa")  # mask and implementation that the others are compared with
FEWER_KEYS = f"flex, {NARROW[0]} x {NARROW[1]}"


class TimedDevice:
    """The device of the benchmark, and measurements of time on it."""

    def __init__(self) -> None:
        self.device = training_device()
        self.gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32  # of the measurement of attention alone

    def autocast(self) -> torch.autocast:
        """bfloat16 autocast on a GPU; no autocast on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.gpu)

    def seconds(self, work: Callable[[], object], rounds: int, warm: int = 2) -> list[float]:
        """Seconds of each round, after `warm` rounds that are not counted."""
        taken = []
        for number in range(rounds + warm):
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            if number >= warm:
                taken.append(time.perf_counter() - began)
        return taken

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


def attention(device: TimedDevice, options: argparse.Namespace) -> None:
    """Forward and backward pass of one attention operation with each mask, compared with dense causal attention."""
    sizes = SIZES[options.size]
    layout, heads = TokenLayout(GRID["text_positions"], GRID["side"], GRID["kernel"]), sizes["heads"]
    shape = (options.batch, heads, layout.length, sizes["width"] // heads)
    q, k, v, slope = (torch.randn(shape, device=device.device, dtype=device.dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows: list[dict[str, Any]] = []
    # What may leave the GPU unusable comes last, when the other rows are kept.
    for makers in (shipped_attention(layout, device, shape[-1]), narrower_attention(layout, device)):
        works: dict[tuple[str, str], Callable[[], None]] = {}
        for name, make in makers.items():
            try:
                attend = make()
                works[name] = lambda f=attend: torch.autograd.grad(f(*leaves), leaves, slope) and None
                works[name]()
            except Exception as error:  # one implementation does not run here; the others still count
                works.pop(name, None)
                rows.append({**attention_facts(name, layout), "ms": reason(error)})
        rows += attention_rows(works, rows, layout, device, options.rounds)
        keep_results("decoder_attention", options.size, rows)
    note = (
        f"Queries, keys and values {shape}, forward and backward pass without projections; medians of "
        f"{options.rounds} rounds. Numbers of pairs are relative to a causal mask; those in blocks are all pairs of "
        "the 128 x 128 blocks, or of those that are named, that have a visible one."
    )
    write_results("decoder_attention", options.size, rows, note)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Makers = dict[tuple[str, str], Callable[[], Attention]]  # by mask and implementation


def shipped_attention(layout: TokenLayout, device: TimedDevice, head_width: int) -> Makers:
    """Dense causal attention, and each mask by each implementation of recipes."""
    dense = partial(nn.functional.scaled_dot_product_attention, is_causal=True)
    found: Makers = {DENSE: lambda: dense}
    for kind in KINDS:
        for one in ("flex", "masked") if device.gpu else ("local", "masked"):
            found[kind, one] = partial(make_attend, one, kind, layout, device.device, head_width)
    return found


def narrower_attention(layout: TokenLayout, device: TimedDevice) -> Makers:
    """Each mask by FlexAttention with fewer keys per block; nothing without a GPU."""
    return {(kind, FEWER_KEYS): partial(narrow_attend, kind, layout, device.device) for kind in KINDS if device.gpu}


def attention_facts(name: tuple[str, str], layout: TokenLayout) -> dict[str, Any]:
    """The cells of a row that are not measured."""
    mask, implementation = name
    block = NARROW if implementation == FEWER_KEYS else BLOCK
    whole = layout.length * (layout.length + 1) // 2
    return {
        "mask": mask,
        "implementation": implementation,
        "relative pairs": 1.0 if name == DENSE else round(visible_pairs(mask, layout) / whole, 3),
        "relative pairs in blocks": 1.0 if name == DENSE else round(block_share(mask, layout, block), 3),
    }


def attention_rows(
    works: dict[tuple[str, str], Callable[[], None]],
    earlier: list[dict[str, Any]],
    layout: TokenLayout,
    device: TimedDevice,
    rounds: int,
) -> list[dict[str, Any]]:
    """Rows of those that run here. Dense causal attention is among them, or among the earlier rows, or did not run."""
    taken: dict[tuple[str, str], list[float]] = {name: [] for name in works}
    for _ in range(rounds):  # in turns, so that other load on the machine affects all of them
        for name, work in works.items():
            taken[name] += [gpu_seconds(work)] if device.gpu else device.seconds(work, 1, warm=1)
    rows = [
        attention_facts(name, layout) | {"ms": round(1e3 * statistics.median(values), 2)}
        for name, values in taken.items()
    ]
    dense = next((row["ms"] for row in earlier + rows if row["mask"] == DENSE[0]), None)
    for row in rows:
        relative = round(dense / row["ms"], 2) if isinstance(dense, float) else ""
        row["speed relative to dense causal"] = relative
    return rows


def sampling(device: TimedDevice, options: argparse.Namespace) -> None:
    """Time of whole grids with a cache, on a GPU with a CUDA graph, too.

    Without a cache, the time of one token, the same for each, times their number.
    """
    with device.device:
        network = Autoregressive(**SIZES[options.size], **GRID, attention=options.attention).network.eval()
    layout, count = network.layout, options.batch
    text = torch.randint(network.text_vocabulary, (1, layout.text), device=device.device)
    uniform = uniforms(list(range(count)), layout.image)[None].to(device.device)

    def cached(with_graph: bool) -> None:
        graph = DeviceGraph(memory_pool()) if with_graph else None
        with device.autocast():
            sample_tokens(network, text, uniform, Choice(), graph=graph)

    image = torch.zeros(count, layout.image, dtype=torch.int64, device=device.device)

    @torch.no_grad()
    def one_token() -> None:
        with device.autocast():
            network.image_logits(network(text.expand(count, -1), image)[:, -1])

    token = statistics.median(device.seconds(one_token, 3))
    caches = network.new_caches(count)
    with torch.no_grad(), device.autocast():
        network(text, image[:1, :0], caches)
    dense = 2 * len(network.kinds) * count * layout.length * network.norm.normalized_shape[0]
    note = (
        f"{count} images of one caption, {layout.image:,} tokens each. Without a cache, all {layout.length:,} "
        "positions are computed for each token; the time is that of one token times their number. The cache holds "
        f"{caches.numbers:,} numbers, {caches.numbers / dense:.2f} of the keys and values of all sequences and "
        "positions."
    )
    works = {"without a cache": None, "with a cache": partial(cached, False)}
    if has_graphs(device.device):
        works["with a cache and a CUDA graph"] = partial(cached, True)
    rows: list[dict[str, Any]] = []
    for name, work in works.items():
        try:
            value = token * layout.image if work is None else device.seconds(work, 1, warm=device.gpu)[0]
        except Exception as error:  # a graph that cannot be captured here; the others still count
            rows.append({"sampling": name, "images": count, "s": reason(error)})
            continue
        rows.append(
            {"sampling": name, "images": count, "s": round(value, 2), "images/s": round(count / value, 4),
             "relative speed": round(token * layout.image / value, 1)}
        )  # fmt: skip
        keep_results("decoder_sampling", options.size, rows)
    write_results("decoder_sampling", options.size, rows, note)


PARTS = {"attention": attention, "sampling": sampling}


def main(arguments: list[str] | None = None) -> None:
    device = TimedDevice()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--size", choices=list(SIZES), default="1b" if device.gpu else "small")
    parser.add_argument("--batch", type=positive, default=16 if device.gpu else 2, help="batch size")
    parser.add_argument("--rounds", type=positive, default=20 if device.gpu else 5, help="measured steps")
    parser.add_argument("--attention", choices=["auto", "flex", "local", "masked"], default="auto")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    for part in options.parts:
        PARTS[part](device, options)


if __name__ == "__main__":
    main()
