"""What each throughput lever is worth: the recipe of yamls/sd2_base.yaml from a plain baseline on, lever by lever.

    python benchmarks/levers.py                                        # a small network on a CPU
    python benchmarks/levers.py --size sd2 --resolution 256 512 --batch 256 --microbatch 32
    composer -n 8 benchmarks/levers.py --size sd2 --batch 2048 --microbatch 32

The baseline encodes pictures and captions in every step, has 32-bit norms and eager attention, and updates Composer's
EMA after every batch. Each lever keeps those before it. All train the same network from the same weights on the same
batches with the same noise, by the Trainer that the recipe builds; the runs of all levers take turns, forwards and
backwards, so that what else the machine does falls on all of them. Only whole steps after a warm-up count.
"""

import argparse
import contextlib
import gc
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
import yaml
from composer.utils import dist
from diffusers import AutoencoderKL
from open_clip import CLIP
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import baseline
from benchmarks.encode import TEXTS, VAES, VISION
from benchmarks.latent_sets import Encoders, encoder_components, write_set
from benchmarks.reporting import write_results
from benchmarks.steady import Steady, on_first_rank, run_steady
from precompute.encoders.text import Tower
from recipes.build import build_on_meta
from recipes.components import COMPONENTS
from recipes.config import Recipe, load
from recipes.trainer import build_trainer


@dataclass(frozen=True)
class Size:
    """A network, and encoders whose work relative to it is as in Stable Diffusion 2."""

    encoders: Encoders
    model: list[str]
    resolutions: list[int]
    batch: int


SIZES = {
    "small": Size(
        Encoders(
            {"block_out_channels": (16, 32, 64, 64), "layers_per_block": 2, "norm_num_groups": 8},
            {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 24},
        ),
        [
            "model.denoiser.channels=[40,80,160,160]",
            "model.denoiser.heads=[1,2,4,4]",
            "model.denoiser.norm_groups=8",
            "model.denoiser.text_width=32",
        ],
        [128],
        16,
    ),
    "sd2": Size(Encoders(VAES["sd2"], TEXTS["sd2"]), [], [256], 64),
}


@dataclass(frozen=True)
class Lever:
    """Changes of the recipe that come on top of those before.

    Attributes:
        name: as in the table.
        changes: `key=value` overrides.
        missing: why it cannot run here; empty where it can.
    """

    name: str
    changes: list[str]
    missing: str = ""


@dataclass
class Measured:
    """What the runs with one lever gave.

    Attributes:
        rounds: samples/s of each window, a list a round.
        losses: of every step of the first round.
        repeat: largest difference of a step's loss between two rounds.
        peak: bytes.
        error: why there are none.
    """

    rounds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    repeat: float = 0.0
    peak: int = 0
    error: str = ""


def levers(folder: Path, resolution: int, repeat: float, gpu: bool) -> list[Lever]:
    """The baseline and the levers, in their order.

    Args:
        folder: what `write_set` wrote.
        resolution: of the pictures.
        repeat: how often an epoch has each sample.
        gpu: whether there is one.
    """
    plain_data = {
        "name": "encoded_in_loop",
        "streams": {"train": {"name": "local", "path": f"{folder}/latents/train", "repeat": repeat}},
        "resolution": resolution,
        "pictures": f"{folder}/pictures",
        "caption_dropout": 0.1,
        **encoder_components(folder, gpu),
    }
    data = {key: plain_data[key] for key in ("streams", "resolution", "caption_dropout")}
    no_gpu = "" if gpu else "needs a GPU"
    found = [
        Lever(
            "baseline",
            [
                f"data={_flow(plain_data)}",
                "algorithms.channels_last=null",
                "algorithms.low_precision_norms=null",
                "algorithms.fused_group_norm=null",
                "algorithms.attention.implementation=eager",
                "algorithms.average={name: composer_ema, decay: 0.9999}",
                "optimizer.fused=false",
            ],
        ),
        Lever("precomputed latents", [f"data={_flow({'name': 'latents', **data})}"]),
        Lever("scheduled EMA", ["algorithms.average={name: scheduled_ema, decay: 0.9999, last: 50000ba}"]),
        Lever("attention", ["algorithms.attention.implementation=auto"]),
        Lever("channels_last", ["algorithms.channels_last={name: channels_last}"]),
        Lever("low-precision norms", ["algorithms.low_precision_norms={name: low_precision_norms}"], no_gpu),
        Lever("fused GroupNorm + SiLU", ["algorithms.fused_group_norm={name: fused_group_norm, when: auto}"], no_gpu),
        Lever("fused AdamW", ["optimizer.fused=true"]),
    ]
    return found


def _flow(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, default_flow_style=True, width=10**6).strip()


def recipe_with(
    changes: list[str],
    size: Size,
    folder: Path,
    resolution: int,
    batch: int,
    microbatch: int | None,
    callbacks: Sequence[str] = (),
) -> Recipe:
    """yamls/sd2_base.yaml at a size, with the changes on top, and no more than training itself and some callbacks."""
    recipe = load(
        ROOT / "yamls" / "sd2_base.yaml",
        [
            *size.model,
            f"output={folder}/run",
            f"data.streams.train.path={folder}/latents/train",
            f"data.resolution={resolution}",
            "data.workers=1",
            "evals.val=null",
            "schedule.warmup=1ba",  # or the weights, and with them the losses, would hardly move
            "training.duration=1400000ba",
            f"training.global_batch={batch}",
            f"training.microbatch={'null' if microbatch is None else microbatch}",
            "training.precision=auto",
            "training.eval_every=null",
            "checkpoints={save: false, every: null, autoresume: false}",
            *changes,
            f"data.workers={8 if torch.cuda.is_available() else 1}",
        ],
        Recipe,
    )
    recipe.callbacks = {name: recipe.callbacks[name] for name in callbacks}
    recipe.loggers = {}
    return recipe


def measure(recipes: dict[str, Recipe], rounds: int, steady: tuple[int, int, int], log: Any) -> dict[str, Measured]:
    """Trains every recipe `rounds` times, in turns.

    Args:
        recipes: by the lever's name.
        rounds: how often each.
        steady: arguments of `Steady`.
        log: file that the runs print to.
    """
    found = {name: Measured() for name in recipes}
    for number in range(rounds):
        for name in list(recipes) if number % 2 == 0 else reversed(recipes):
            measured = found[name]
            if measured.error:
                continue
            try:
                with contextlib.redirect_stdout(log):
                    run = run_steady(build_trainer(recipes[name]), Steady(*steady))
            except torch.OutOfMemoryError:
                measured.error = "out of memory"
                run = None
            if run is not None:
                measured.rounds.append(run.rates)
                measured.peak = max(measured.peak, run.peak)
                measured.losses = measured.losses or run.losses
                differences = [abs(a - b) for a, b in zip(measured.losses, run.losses, strict=True)]
                measured.repeat = max(measured.repeat, *differences)
                say(f"round {number + 1} of {rounds}, {name}: {statistics.median(run.rates):,.2f} samples/s")
            del run
            let_go()
    return found


def let_go() -> None:
    """Frees what a run has left."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cards(found: dict[str, Measured]) -> Iterator[dict[str, Any]]:
    """A row a lever; ratios are those of runs of the same round, which were neighbours in time."""
    first = previous = next(iter(found.values()))
    for name, measured in found.items():
        rates = sorted(rate for windows in measured.rounds for rate in windows)
        if measured.error or first.error:
            yield dict.fromkeys(ROWS, "") | {"lever": name, "images/s": measured.error or round(_middle(rates), 2)}
            continue
        differences = [a - b for a, b in zip(measured.losses, first.losses, strict=True)]
        yield {
            "lever": name,
            "images/s": round(_middle(rates), 2),
            "middle half": f"{rates[len(rates) // 4]:,.2f} to {rates[-1 - len(rates) // 4]:,.2f}",
            "to previous": round(ratio(measured, previous), 3),
            "to baseline": round(ratio(measured, first), 3),
            "peak MB": round(measured.peak / 1e6, 1),
            "loss": round(statistics.mean(measured.losses), 5),
            "to baseline's": f"{statistics.mean(differences):+.1e}",
            "largest in a step": f"{max(map(abs, differences)):.1e}",
            "between rounds": f"{measured.repeat:.1e}",
        }
        previous = measured


ROWS = ("lever", "images/s", "middle half", "to previous", "to baseline", "peak MB", "loss", "to baseline's")
ROWS += ("largest in a step", "between rounds")


def _middle(rates: list[float]) -> float:
    return statistics.median(rates) if rates else 0.0


def ratio(one: Measured, other: Measured) -> float:
    """How many times as fast, as the median over the rounds."""
    pairs = zip(one.rounds, other.rounds, strict=False)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def flops(size: Size, recipe: Recipe, resolution: int) -> dict[str, float]:
    """GFLOP a sample, by PyTorch's counter: training of the U-Net, and encoding."""
    from recipes.models.unet import UNet

    network: UNet = build_on_meta(recipe.model).denoiser
    text, vae = size.encoders.text, size.encoders.vae
    side = resolution // 2 ** (len(vae["block_out_channels"]) - 1)
    with torch.device("meta"), torch.no_grad():
        encoder = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, **vae
        )
        tower = Tower(CLIP(embed_dim=64, vision_cfg=VISION, text_cfg=text), "text")
        tower.blocks = tower.blocks[:-1]
        works = {
            "training of the U-Net": lambda: network(
                torch.empty(1, 4, side, side), torch.zeros(1, dtype=torch.long), torch.empty(1, 77, text["width"])
            ),
            "VAE": lambda: encoder.encode(torch.empty(1, 3, resolution, resolution)),
            "text encoder": lambda: tower(torch.zeros(1, 77, dtype=torch.long)),
        }
        counts = {}
        for name, work in works.items():
            with FlopCounterMode(display=False) as counter:
                work()
            counts[name] = counter.get_total_flops() / 1e9
    counts["training of the U-Net"] *= 3
    return counts


def notes(counts: dict[str, float], found: dict[str, Measured], skipped: list[Lever], text: str) -> str:
    """What a reader of the table must know."""
    encoding = counts["VAE"] + counts["text encoder"]
    lines = [
        text,
        "GFLOP a sample: " + ", ".join(f"{name} {count:,.2f}" for name, count in counts.items())
        + f"; encoding is {encoding / counts['training of the U-Net']:.2f} of training.",
    ]  # fmt: skip
    first, second = list(found.values())[:2]
    if not (first.error or second.error):
        gain = ratio(second, first)
        verdict = "met" if gain >= 1.4 else "not met"
        lines.append(f"Goal: precomputed latents at least 1.4x encoders in the loop: {gain:.2f}x, {verdict}.")
    lines += [f"Not run here: {lever.name} ({lever.missing})." for lever in skipped]
    return "\n".join(lines)


def say(line: str) -> None:
    """Prints on the first rank."""
    if dist.get_global_rank() == 0:
        print(line, file=sys.__stdout__, flush=True)


def main(arguments: list[str] | None = None) -> dict[int, dict[str, Measured]]:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="sd2" if gpu else "small")
    parser.add_argument("--resolution", type=int, nargs="+", help="sides of the pictures")
    parser.add_argument("--batch", type=int, help="samples a step, over all ranks")
    parser.add_argument("--microbatch", type=int, help="samples that a device takes at once; all, if not given")
    parser.add_argument("--samples", type=int, help="pictures in the set; four batches, if not given")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each lever")
    parser.add_argument("--warm-up", type=int, default=20 if gpu else 3, help="steps before the first window")
    parser.add_argument("--windows", type=int, default=5 if gpu else 4, help="windows of a run")
    parser.add_argument("--steps", type=int, default=10 if gpu else 1, help="steps of a window")
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    batch = options.batch or size.batch
    samples = options.samples or 4 * batch
    resolutions = options.resolution or size.resolutions
    warnings.filterwarnings("ignore", message="Specifying `eval_interval")
    dist.initialize_dist("gpu" if gpu else "cpu")
    for group, names in baseline.COMPONENTS.items():
        COMPONENTS[group].update(names)
    with contextlib.ExitStack() as stack:
        folder = Path(on_first_rank(lambda: stack.enter_context(tempfile.TemporaryDirectory())))
        log = stack.enter_context(open(folder / f"log{dist.get_global_rank()}.txt", "w", encoding="utf-8"))
        with contextlib.redirect_stdout(log):
            on_first_rank(lambda: write_set(folder / "set", size.encoders, resolutions, samples, gpu))
        everything = {}
        for resolution in resolutions:
            everything[resolution] = at_resolution(resolution, folder / "set", size, batch, samples, options, log)
        dist.barrier()
    return everything


def at_resolution(
    resolution: int, folder: Path, size: Size, batch: int, samples: int, options: Any, log: Any
) -> dict[str, Measured]:
    """The table of one resolution."""
    steps = options.warm_up + options.windows * options.steps
    # One epoch, so that what happens between two is not measured.
    repeat = math.ceil((steps + 1) * batch / samples)
    chosen = levers(folder, resolution, repeat, torch.cuda.is_available())
    recipes: dict[str, Recipe] = {}
    changes: list[str] = []
    for lever in chosen:
        if not lever.missing:
            changes = changes + lever.changes
            recipes[lever.name] = recipe_with(changes, size, folder, resolution, batch, options.microbatch)
    steady = (options.warm_up, options.windows, options.steps)
    found = measure(recipes, options.rounds, steady, log)
    rows = list(cards(found))
    # How far apart losses are that differ in nothing but the draw of weights, order and noise.
    other = recipe_with([*chosen[0].changes, *chosen[1].changes, "seed=18"], size, folder, resolution, batch, None)
    seed = measure({"seed": other}, 1, (options.warm_up, options.windows, options.steps), log)["seed"].losses
    counts = flops(size, recipes["baseline"], resolution)
    clock = ""
    if not torch.cuda.is_available():
        clock = f" {torch.get_num_threads()} thread; seconds are those that the training process computed."
    windows = f"{options.rounds} rounds of {options.windows} windows of {options.steps} steps after {options.warm_up}"
    text = (
        f"{resolution} x {resolution} pixels, {batch} samples a step on {dist.get_world_size()} ranks, {windows}.{clock} "
        f"Losses: mean over these {len(seed)} steps; another seed has {statistics.mean(seed):.5f}. "
        "Peak memory: tensors on the first rank."
    )
    if dist.get_global_rank() == 0:
        name = (
            options.size
            if len(size.resolutions) == 1 and resolution in size.resolutions
            else f"{options.size}_{resolution}"
        )
        write_results("levers", name, rows, notes(counts, found, [lever for lever in chosen if lever.missing], text))
    return found


if __name__ == "__main__":
    main()
