"""Where the time of inference goes, by class of operator, and how long the sequences of attention are.

    python benchmarks/operators.py                   # both parts; times of small models on a CPU
    python benchmarks/operators.py --parts counts    # lengths and memory, at the published sizes on any machine
    python benchmarks/operators.py --parts times --size published --workloads "U-Net at 256"

`times` measures each model with attention written out as matrix products and softmax, and with PyTorch's
scaled_dot_product_attention, in turns. On a GPU the shares are of the kernels' time, on a CPU of the time of one
thread. `counts` records every call of attention of the real models, which compute nothing on the meta device. The
published figures are those of Golden et al. 2023, "Generative AI Beyond LLMs", measured on an A100 with other models of
the same kinds.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import profile

from benchmarks.common.attention_calls import SPAN, WAYS, Call, attention_by, scores_bytes, unet_scores_bytes
from benchmarks.common.options import positive
from benchmarks.common.random_encoders import VAES, new_vae
from benchmarks.common.reporting import keep_results, write_results
from benchmarks.common.timing import times, training_device
from benchmarks.gpu_run.encoding import profiled
from benchmarks.gpu_run.operators import is_work, kernels_of, kind_of
from benchmarks.launches import narrow_recipe
from recipes.config.build import build, build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.models.autoregressive.sampler import Choice, Drawing, sample_tokens, uniforms
from recipes.models.autoregressive.transformer import TokenTransformer

TEXT = 77  # positions of Stable Diffusion's text
STEPS = 4  # tokens of cached sampling that are measured together; the profiler takes seconds for more
CLASSES = {"convolution": "convolution", "matrix product": "linear"}  # kind of operator -> class of the paper
COLUMNS = ("attention", "convolution", "linear", "group norm", "other")
# End-to-end speed-ups by flash attention (table II): those of models that resemble ours.
PUBLISHED = {
    "U-Net at 512": "1.67 (Stable Diffusion)",
    "DALL-E, all positions": "1.11 (Muse)",
    "DALL-E, cached sampling": "1.17 (Parti)",
    "GPT-2": "1.52 (LLaMA)",
}
SHARES = (
    "Published shares: attention 41.3% on average before flash attention; after it 13 to 25% in diffusion models and "
    "37 to 45% in transformers; convolution up to 36% before and 44% after; linear up to 49% after, in transformers; "
    "group norm 4 to 11% of diffusion models before."
)
Work = Callable[[], Tensor]


@dataclass(frozen=True)
class Setting:
    """How models are built.

    Attributes:
        device: meta: nothing is computed.
        small: narrow models and small images.
        batch: samples of a call.
    """

    device: torch.device
    small: bool
    batch: int = 1

    @property
    def gpu(self) -> bool:
        """Whether networks compute in bfloat16."""
        return self.device.type == "cuda"

    def autocast(self) -> Any:
        """For transformers, whose residual stream and norms are float32."""
        return torch.autocast("cuda", torch.bfloat16) if self.gpu else nullcontext()

    def transformer(self, network: nn.Module) -> nn.Module:
        """A network with its matrices in the dtype of autocast, which would else cast them in each call."""
        for module in network.blocks.modules():
            if self.gpu and isinstance(module, nn.Linear):
                module.bfloat16()
        return network

    def convolutional(self, network: nn.Module) -> nn.Module:
        """A network in the memory format that the recipes have."""
        network = network.to(memory_format=torch.channels_last)
        return network.bfloat16() if self.gpu else network

    def model(self, recipe: str, small: str, *changes: str) -> Any:
        """The model of a shipped recipe with random weights.

        Args:
            recipe: its name.
            small: the one of `launches.NARROW` that takes its place.
            changes: overrides.
        """
        path = ROOT / "yamls" / f"{recipe}.yaml"
        found = narrow_recipe(small, *changes) if self.small else load_config(path, list(changes), Recipe, [])
        if self.device.type == "meta":
            return build_on_meta(found.model).eval()
        with self.device:
            return build(found.model).eval()


def unet(setting: Setting, resolution: int) -> Work:
    """One step of denoising."""
    side = resolution // (32 if setting.small else 8)
    task = setting.model("sd2_base" if resolution == 256 else "sd2_base_512", "sd2_base")
    network = setting.convolutional(task.denoiser)
    like = next(network.parameters())
    latents = like.new_zeros(setting.batch, network.latent_channels, side, side).normal_()
    text = like.new_zeros(setting.batch, TEXT, network.text_width).normal_()
    steps = torch.full((setting.batch,), 500, device=setting.device)
    return lambda: network(latents, steps, text)


def decoder_network(setting: Setting) -> tuple[TokenTransformer, Tensor]:
    """DALL-E's transformer with dense masks, and a text (B, T)."""
    network = setting.transformer(setting.model("dalle_1b", "dalle_1b", "model.attention=masked").network)
    return network, torch.ones(setting.batch, network.layout.text, dtype=torch.int64, device=setting.device)


def decoder(setting: Setting) -> Work:
    """All positions at once, as in training."""
    network, text = decoder_network(setting)
    image = text.new_ones(setting.batch, network.layout.image)

    def work() -> Tensor:
        with setting.autocast():
            return network(text, image)

    return work


def sampling(setting: Setting) -> Work:
    """Some tokens, one after another, with a cache that holds the text. Each call draws the same ones again."""
    network, text = decoder_network(setting)
    uniform = uniforms(list(range(setting.batch)), network.layout.image)[:, None].to(setting.device)
    drawing = Drawing(network, text, uniform, Choice(), text[:, :0])
    with setting.autocast(), torch.no_grad():
        drawing.first_token(drawing.first_logits())

    def work() -> Tensor:
        drawing.caches.image.zero_()
        with setting.autocast():
            drawing.next_tokens(min(STEPS, network.layout.image - 1), None)
        return drawing.tokens

    return work


def vae(setting: Setting, resolution: int) -> Work:
    """Encoding of images."""
    side = resolution // (4 if setting.small else 1)
    with setting.device:
        network = setting.convolutional(new_vae(VAES["small" if setting.small else "sd2"]).eval())
    images = next(network.parameters()).new_zeros(setting.batch, 3, side, side).normal_()
    return lambda: network.encode(images).latent_dist.parameters


def language(setting: Setting) -> Work:
    """All positions of a text at once, without logits."""
    network = setting.transformer(setting.model("gpt2_1b", "docs_gpt2").network)
    tokens = torch.ones(setting.batch, network.positions.num_embeddings, dtype=torch.int64, device=setting.device)

    def work() -> Tensor:
        with setting.autocast():
            return network(tokens)

    return work


WORKLOADS: dict[str, Callable[[Setting], Work]] = {
    "U-Net at 256": partial(unet, resolution=256),
    "U-Net at 512": partial(unet, resolution=512),
    "VAE encoding at 256": partial(vae, resolution=256),
    "VAE encoding at 512": partial(vae, resolution=512),
    "DALL-E, all positions": decoder,
    "DALL-E, cached sampling": sampling,
    "GPT-2": language,
}


def class_of(operator: str) -> str:
    """The paper's class of an outermost operator or span. A softmax outside of attention chooses tokens."""
    if operator == SPAN:
        return "attention"
    kind = kind_of(operator)
    if kind == "norm" and "group" in operator:
        return "group norm"
    return CLASSES.get(kind, "other")


def times_by_class(profiler: profile) -> dict[str, float]:
    """Microseconds of each class: of the GPU's kernels, without any of one thread of the CPU."""
    kernels = kernels_of(profiler)
    found: Counter[str] = Counter(dict.fromkeys(COLUMNS, 0.0))
    for event in profiler.events():
        if event.device_type == DeviceType.CPU and event.cpu_parent is None:
            found[class_of(event.name)] += launched(event) if kernels else event.cpu_time_total
    if kernels:
        rest = sum(kernels.kinds.values()) - sum(found.values())  # of kernels that no operator of PyTorch launched
        assert rest >= -1.0, "kernels are counted twice"
        found["other"] += rest
    return dict(found)


def launched(event: Any) -> float:
    """Microseconds of the kernels of an operator and of those that it calls, without spans around kernels."""
    own = sum(kernel.duration for kernel in event.kernels if is_work(kernel, kernel.name))
    return own + sum(launched(child) for child in event.cpu_children)


@torch.no_grad()
def measure(name: str, setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """A row of the times of a workload for each way of computing attention."""
    work = WORKLOADS[name](setting)

    def by(way: Any) -> Tensor:
        with attention_by(way):
            return work()

    works = {way: partial(by, way) for way in WAYS}
    seconds = times(works, rounds, setting.gpu)
    spent: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    profiles = min(rounds, 3)
    for _ in range(profiles):
        for way in WAYS:
            spent[way].update(times_by_class(profiled(works[way], setting.device)))
    rows = []
    for way in WAYS:
        whole = spent[way].total()
        rows.append(
            {
                "workload": name,
                "attention computed": way,
                "ms": round(1e3 * seconds[way], 2),
                "speed-up": round(seconds[WAYS[0]] / seconds[way], 2),
                "published": "" if setting.small or way == WAYS[0] else PUBLISHED.get(name, ""),
                "profiled ms": round(whole / 1e3 / profiles, 2),
                **{column: f"{spent[way][column] / whole:.1%}" for column in COLUMNS},
            }
        )
    return rows


@contextmanager
def one_thread(setting: Setting) -> Iterator[None]:
    """A context in which a CPU computes in one thread, whose time the profiler sees."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if setting.gpu else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def recorded(work: Work) -> list[Call]:
    """Every call of attention of one call of a workload."""
    calls: list[Call] = []
    with attention_by("one call", calls):
        work()
    return calls


def sampled(*changes: str) -> dict[str, list[Call]]:
    """Kind of the mask -> the calls of one layer while a whole grid is sampled, the first of which takes the text.

    Args:
        changes: of dalle_1b, whose grid this has with few and narrow layers, which do not change any length.
    """
    narrow = ["layers=4", "width=16", "heads=1", "codes=8", "text_vocabulary=16"]
    changes = (*(f"model.{change}" for change in narrow), *changes)
    recipe = load_config(ROOT / "yamls" / "dalle_1b.yaml", list(changes), Recipe, [])
    network, calls = build(recipe.model).network.eval(), []
    layout, layers = network.layout, len(network.kinds)
    text = torch.ones(1, layout.text, dtype=torch.int64)
    with attention_by("one call", calls):
        sample_tokens(network, text, uniforms([0], layout.image)[:, None], Choice())
    return {kind: calls[network.kinds.index(kind) :: layers] for kind in dict.fromkeys(network.kinds)}


def lengths(calls: list[Call]) -> str:
    """The numbers of queries in the order of the calls, those of equal neighbours once."""
    return ", ".join(f"{queries:,} x{len(list(same))}" for queries, same in groupby(c.queries for c in calls))


def count_row(name: str, calls: list[Call], formula: int) -> dict[str, Any]:
    """A row of the counts of a workload with one sample.

    Args:
        formula: bytes with one head.
    """
    queries = [call.queries for call in calls]
    return {
        "workload": name,
        "calls": len(calls),
        "queries, x calls": lengths(calls),
        "longest / shortest": round(max(queries) / min(queries), 1),
        "MB of scores, one head": round(sum(call.bytes for call in calls) / 1e6, 3),
        "by the formula": round(formula / 1e6, 3),
        "all heads": round(sum(call.matrices * call.bytes for call in calls) / 1e6, 1),
    }


def formulas() -> dict[str, int]:
    """Workload -> bytes of all scores of one sample with one head, by the formulas with the blocks that it has."""
    return {
        "U-Net at 256": unet_scores_bytes(32**2, TEXT, depth=3, blocks=5),
        "U-Net at 512": unet_scores_bytes(64**2, TEXT, depth=3, blocks=5),
        "VAE encoding at 256": scores_bytes(32**2),
        "VAE encoding at 512": scores_bytes(64**2),
        "DALL-E, all positions": 24 * scores_bytes(256 + 32**2),
        "GPT-2": 40 * scores_bytes(1024),
    }


def counts() -> None:
    """The tables of lengths and memory."""
    setting = Setting(torch.device("meta"), small=False)
    rows = [count_row(name, recorded(WORKLOADS[name](setting)), value) for name, value in formulas().items()]
    of_paper = " and ".join(f"{unet_scores_bytes(side**2, TEXT, depth=3) / 1e6:.3f}" for side in (32, 64))
    notes = (
        "One sample and scores in 16 bits. Of a U-Net, the formula is the paper's with five transformer blocks per "
        f"level in place of two, with which it gives {of_paper} MB."
    )
    write_results("attention_calls", "published", rows, notes)
    rows = []
    for kind, (_, *steps) in sampled().items():
        seen = [call.seen for call in steps]
        rows.append(
            {
                "mask of the layer": kind,
                "tokens after the first": len(steps),
                "keys of each product": ", ".join(str(keys) for keys in sorted({call.keys for call in steps})),
                "seen by the first": seen[0],
                "seen by the last": seen[-1],
                "most are first seen by token": seen.index(max(seen)) + 1,
            }
        )
    write_results("attention_cached", "published", rows, "DALL-E's grid of 32 x 32 tokens after 256 of text.")


def main(arguments: list[str] | None = None) -> None:
    device = training_device()
    gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["counts", "times"], default=["counts", "times"])
    parser.add_argument("--size", choices=["small", "published"], default="published" if gpu else "small")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--batch", type=positive, default=1, help="samples of a call")
    parser.add_argument("--rounds", type=positive, default=10 if gpu else 5, help="measured calls of each way")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if "counts" in options.parts:
        counts()
    if "times" in options.parts:
        setting = Setting(device, options.size == "small", options.batch)
        rows: list[dict[str, Any]] = []
        with one_thread(setting):
            for name in options.workloads:
                rows += measure(name, setting, options.rounds)
                keep_results("operators", options.size, rows)
        notes = (
            f"Batches of {options.batch}; sampling: {STEPS} tokens. Speed-ups are those of the medians of "
            f"{options.rounds} calls in turns; shares are of profiled calls. Attention is scores, softmax and their "
            f"product with the values; projections are linear. {'' if setting.small else SHARES}"
        )
        write_results("operators", options.size, rows, notes)


if __name__ == "__main__":
    main()
