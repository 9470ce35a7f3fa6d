"""DALL-E's transformer: training, sparse beside dense attention, sampling with and without a cache.

    python benchmarks/decoder.py                          # all parts: a small model on a CPU, 1.3 billion on a GPU
    python benchmarks/decoder.py --parts training --size 1b --batch 32 --compile
    python benchmarks/decoder.py --parts attention sampling

Goals on one H200 in bf16: 65,000 tokens/s at 1.3 billion parameters, sparse layers at least 1.5 times as fast as dense
causal ones at 1,280 positions, cached sampling at least 20 times as fast as uncached at 1,024 image tokens.

Which FLOPs are counted: 6 for each weight of a matrix and token (2 forward, 4 backward), the unembedding included and
tables not; 12 for each head width and pair of a query and a key. "Sparse" counts the pairs that a mask shows, which is
what the model needs; "dense" counts all S * S pairs, as published MFU figures often do. What is computed again in the
backward pass is not counted. MFU is a share of what the chip's maker names for dense bf16 products (989 TFLOP/s for an
H100 or H200); a CPU has none.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.reporting import write_results
from recipes.models.autoregressive.masks import (
    Kind,
    TokenLayout,
    dense_mask,
    visible,
    visible_by_columns,
    visible_pairs,
)
from recipes.models.autoregressive.sampler import Choice, sample_tokens, uniforms
from recipes.models.autoregressive.sparse_attention import make_attend
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.autoregressive.transformer import forward_flops

GRID = {"text_positions": 256, "side": 32, "kernel": 11}
SIZES = {
    "small": {"layers": 4, "width": 256, "heads": 4, "text_vocabulary": 2048, "codes": 1024},
    "1b": {"layers": 24, "width": 2048, "heads": 32, "text_vocabulary": 16384, "codes": 8192},  # yamls/dalle_1b.yaml
    "2b": {"layers": 64, "width": 1920, "heads": 30, "text_vocabulary": 16384, "codes": 8192},
}
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # FLOP/s of dense bf16 products, SXM boards
KINDS: tuple[Kind, ...] = ("row", "column", "convolution")


class Machine:
    """Where it runs, and how long work takes there."""

    def __init__(self) -> None:
        self.gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.gpu else "cpu")
        self.dtype = torch.bfloat16 if self.gpu else torch.float32  # of what attention alone is measured with

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.gpu)

    def seconds(self, work: Callable[[], object], rounds: int, warm: int = 2) -> list[float]:
        """Seconds of each round."""
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

    def peak(self) -> float | None:
        """FLOP/s that MFU is taken of; None for a chip that is not listed, and for a CPU."""
        name = torch.cuda.get_device_name() if self.gpu else ""
        return next((peak for part, peak in PEAKS.items() if part in name), None)


def block_share(kind: Kind, layout: TokenLayout) -> float:
    """Blocks of 128 x 128 that hold a visible pair, in FlexAttention's order of tokens, of those of a causal mask."""
    sees = visible_by_columns(layout) if kind == "column" else visible(kind, layout)
    blocks = [
        nn.functional.max_pool2d(mask[None].float(), 128, ceil_mode=True).sum().item()
        for mask in (dense_mask(sees, layout.length), torch.ones(layout.length, layout.length).tril())
    ]
    return blocks[0] / blocks[1]


def training(machine: Machine, options: argparse.Namespace) -> None:
    """Whole steps: forward, backward, clipping, fused AdamW."""
    with machine.device:
        task = Autoregressive(**SIZES[options.size], **GRID, attention=options.attention)
    network, layout = task.network, task.network.layout
    if options.recompute:
        for block in task.blocks():
            block.forward = recomputed(block.forward)
    if options.compile:
        for block in task.blocks():
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-4, betas=(0.9, 0.96), weight_decay=4.5e-2, fused=True)
    batch = {
        "text": torch.randint(network.text_vocabulary, (options.batch, layout.text), device=machine.device),
        "image": torch.randint(network.codes, (options.batch, layout.image), device=machine.device),
    }

    def step() -> None:
        with machine.autocast():
            loss = task(batch)["total"]
        loss.backward()
        nn.utils.clip_grad_norm_(task.parameters(), 4.0)
        optimizer.step()
        optimizer.zero_grad()

    taken = machine.seconds(step, options.rounds, warm=3)
    seconds, peak = statistics.median(taken), machine.peak()
    rates = {
        name: 3 * options.batch * forward_flops(network, name == "sparse") / seconds for name in ("sparse", "dense")
    }
    memory = torch.cuda.max_memory_allocated() / 1e9 if machine.gpu else float("nan")
    row = {
        "parameters": f"{sum(p.numel() for p in task.parameters()):,}",
        "batch": options.batch,
        "attention": options.attention,
        "compiled": "yes" if options.compile else "no",
        "ms a step": round(1e3 * seconds, 1),
        "spread": f"{1e3 * min(taken):.1f} to {1e3 * max(taken):.1f}",
        "tokens/s": round(options.batch * layout.length / seconds),
        **{f"TFLOP/s, {name}": round(rate / 1e12, 3) for name, rate in rates.items()},
        **{f"MFU, {name}": round(rate / peak, 3) if peak else "" for name, rate in rates.items()},
        "GB at most": round(memory, 1) if machine.gpu else "",
    }
    counted = __doc__[__doc__.index("Which FLOPs") :].strip()
    write_results("decoder_training", options.size, [row], counted)


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block whose activations are computed again in the backward pass."""
    return lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)


def attention(machine: Machine, options: argparse.Namespace) -> None:
    """Forward and backward of one attention operation with each mask, beside dense causal attention."""
    sizes = SIZES[options.size]
    layout, heads = TokenLayout(GRID["text_positions"], GRID["side"], GRID["kernel"]), sizes["heads"]
    shape = (options.batch, heads, layout.length, sizes["width"] // heads)
    q, k, v, slope = (torch.randn(shape, device=machine.device, dtype=machine.dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, slope) and None

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    works = {("dense causal", "sdpa"): both(causal)}
    for kind in KINDS:
        for implementation in ("flex", "masked") if machine.gpu else ("local", "masked"):
            works[kind, implementation] = both(make_attend(implementation, kind, layout, machine.device))
    taken: dict[tuple[str, str], list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):  # in turns: what else the machine does falls on all of them
        for name, work in works.items():
            taken[name] += machine.seconds(work, 1, warm=1)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    reference = seconds["dense causal", "sdpa"]
    whole = layout.length * (layout.length + 1) // 2
    rows = [
        {
            "mask": mask,
            "implementation": implementation,
            "share of causal pairs": 1.0 if mask == "dense causal" else round(visible_pairs(mask, layout) / whole, 3),
            "of causal blocks of 128": 1.0 if mask == "dense causal" else round(block_share(mask, layout), 3),
            "ms": round(1e3 * value, 2),
            "times as fast as dense causal": round(reference / value, 2),
        }
        for (mask, implementation), value in seconds.items()
    ]
    note = f"Queries, keys and values {shape}, forward and backward, without projections; medians of {options.rounds}."
    write_results("decoder_attention", options.size, rows, note)


def sampling(machine: Machine, options: argparse.Namespace) -> None:
    """Whole grids with a cache; without one, the time of a token (the same for each) times their number."""
    with machine.device:
        network = Autoregressive(**SIZES[options.size], **GRID, attention=options.attention).network.eval()
    layout, count = network.layout, options.batch
    text = torch.randint(network.text_vocabulary, (1, layout.text), device=machine.device)
    uniform = uniforms(list(range(count)), layout.image)[None].to(machine.device)

    def cached() -> None:
        with machine.autocast():
            sample_tokens(network, text, uniform, Choice())

    image = torch.zeros(count, layout.image, dtype=torch.int64, device=machine.device)

    @torch.no_grad()
    def one_token() -> None:
        with machine.autocast():
            network.image_logits(network(text.expand(count, -1), image)[:, -1])

    whole = statistics.median(machine.seconds(cached, 1 if not machine.gpu else 3, warm=machine.gpu))
    token = statistics.median(machine.seconds(one_token, 3))
    caches = network.new_caches(count)
    with torch.no_grad(), machine.autocast():
        network(text, image[:1, :0], caches)
    dense = 2 * len(network.kinds) * count * layout.length * network.norm.normalized_shape[0]
    rows = [
        {"sampling": name, "pictures": count, "s": round(value, 2), "pictures/s": round(count / value, 4),
         "times as fast": round(token * layout.image / value, 1)}
        for name, value in (("with a cache", whole), ("without", token * layout.image))
    ]  # fmt: skip
    note = (
        f"{count} pictures of one caption, {layout.image:,} tokens each. The cache keeps {caches.numbers:,} numbers, "
        f"{caches.numbers / dense:.2f} of one that keeps every key and value of every sequence."
    )
    write_results("decoder_sampling", options.size, rows, note)


PARTS = {"training": training, "attention": attention, "sampling": sampling}


def main() -> None:
    machine = Machine()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--size", choices=list(SIZES), default="1b" if machine.gpu else "small")
    parser.add_argument("--batch", type=int, default=16 if machine.gpu else 2, help="samples at once")
    parser.add_argument("--rounds", type=int, default=20 if machine.gpu else 5, help="measured steps")
    parser.add_argument("--attention", choices=["auto", "flex", "local", "masked"], default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of each block")
    options = parser.parse_args()
    torch.manual_seed(0)
    for part in options.parts:
        PARTS[part](machine, options)


if __name__ == "__main__":
    main()
