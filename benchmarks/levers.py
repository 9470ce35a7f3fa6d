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
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
import yaml
from composer.utils import dist

from benchmarks import baseline
from benchmarks.latent_sets import encoder_components, write_set
from benchmarks.reporting import write_results
from benchmarks.steady import Steady, let_go, on_first_rank, run_steady, say
from benchmarks.training import SIZES, flops, recipe_with
from recipes.algorithms.modules.compile import why_no_compiler
from recipes.config.recipe import Recipe
from recipes.engines.composer.trainer import build_trainer


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
    one_rank = "" if dist.get_world_size() > 1 else "needs several ranks"
    return [
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
        Lever("torch.compile", ["algorithms.compile={name: compile}"], why_no_compiler(gpu) or ""),
        Lever("CUDA graphs", ["algorithms.compile={name: compile, mode: reduce-overhead}"], no_gpu),
        Lever(
            "FSDP SHARD_GRAD_OP",
            # CUDA graphs need parameters that stay where they are.
            [*(["algorithms.compile.mode=default"] if gpu else []), "training.fsdp={strategy: SHARD_GRAD_OP}"],
            one_rank,
        ),
    ]


def _flow(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, default_flow_style=True, width=10**6).strip()


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


def cards(found: dict[str, Measured]) -> Iterator[dict[str, Any]]:
    """A row a lever; ratios are those of runs of the same round, which were neighbours in time."""
    first = previous = next(iter(found.values()))
    for name, measured in found.items():
        if name == OTHER_SEED:
            continue
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


OTHER_SEED = "another seed"
ROWS = ("lever", "images/s", "middle half", "to previous", "to baseline", "peak MB", "loss", "to baseline's")
ROWS += ("largest in a step", "between rounds")


def _middle(rates: list[float]) -> float:
    return statistics.median(rates) if rates else 0.0


def ratio(one: Measured, other: Measured) -> float:
    """How many times as fast, as the median over the rounds."""
    pairs = zip(one.rounds, other.rounds, strict=False)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def notes(found: dict[str, Measured], chosen: list[Lever], counts: dict[str, float], text: str) -> str:
    """What a reader of the table must know."""
    encoding = counts["VAE"] + counts["text encoder"]
    work = ", ".join(f"{name} {count:,.2f}" for name, count in counts.items())
    share = encoding / counts["training of the U-Net"]
    lines = [text, f"GFLOP a sample: {work}; encoding is {share:.2f} of training."]
    first, second = list(found.values())[:2]
    if not (first.error or second.error):
        gain = ratio(second, first)
        verdict = "met" if gain >= 1.4 else "not met"
        lines.append(f"Goal: precomputed latents at least 1.4x encoders in the loop: {gain:.2f}x, {verdict}.")
    if found[OTHER_SEED].losses:
        lines.append(f"With another seed the loss is {statistics.mean(found[OTHER_SEED].losses):.5f}.")
    lines += [f"Not run here: {lever.name} ({lever.missing})." for lever in chosen if lever.missing]
    return "\n".join(lines)


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
    parser.add_argument("--skip", nargs="+", default=[], metavar="LEVER", help="levers to leave out, by their names")
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    batch = options.batch or size.batch
    samples = options.samples or 4 * batch
    resolutions = options.resolution or size.resolutions
    warnings.filterwarnings("ignore", message="Specifying `eval_interval")
    dist.initialize_dist("gpu" if gpu else "cpu")
    baseline.register()
    with contextlib.ExitStack() as stack:
        folder = Path(on_first_rank(lambda: stack.enter_context(tempfile.TemporaryDirectory())))
        log = stack.enter_context(open(folder / f"log{dist.get_global_rank()}.txt", "w", encoding="utf-8"))
        with contextlib.redirect_stdout(log):
            on_first_rank(lambda: write_set(folder / "set", size.encoders, resolutions, samples, gpu))
        everything = {}
        for resolution in resolutions:
            recipe_of = partial(
                recipe_with,
                size=size,
                folder=folder / "set",
                resolution=resolution,
                batch=batch,
                microbatch=options.microbatch,
            )
            # One epoch, so that what happens between two is not measured.
            repeat = 1 + math.ceil((options.warm_up + options.windows * options.steps) * batch / samples)
            chosen = levers(folder / "set", resolution, repeat, gpu)
            unknown = [name for name in options.skip if name not in [lever.name for lever in chosen[2:]]]
            if unknown:
                parser.error(
                    f"--skip: no lever {unknown[0]}; there are {', '.join(lever.name for lever in chosen[2:])}"
                )
            chosen = [replace(lever, missing="skipped") if lever.name in options.skip else lever for lever in chosen]
            found = run_levers(chosen, recipe_of, options, log)
            everything[resolution] = found
            if dist.get_global_rank() == 0:
                rows = list(cards(found))
                counts = flops(size, recipe_of([]), resolution)
                name = options.size if [resolution] == size.resolutions else f"{options.size}_{resolution}"
                write_results(
                    "levers", name, rows, notes(found, chosen, counts, conditions(resolution, batch, options))
                )
        dist.barrier()
    return everything


def run_levers(
    chosen: list[Lever], recipe_of: Callable[[list[str]], Recipe], options: Any, log: Any
) -> dict[str, Measured]:
    """The runs with each lever that can run here on top of those before, and one with another seed for the losses.

    Args:
        chosen: the levers.
        recipe_of: makes a recipe of changes.
        options: of the command line.
        log: file that the runs print to.
    """
    recipes: dict[str, Recipe] = {}
    changes: list[str] = []
    for lever in chosen:
        if not lever.missing:
            changes = changes + lever.changes
            recipes[lever.name] = recipe_of(changes)
    steady = (options.warm_up, options.windows, options.steps)
    found = measure(recipes, options.rounds, steady, log)
    second = recipe_of([*chosen[0].changes, *chosen[1].changes, "seed=18"])
    return found | measure({OTHER_SEED: second}, 1, steady, log)


def conditions(resolution: int, batch: int, options: Any) -> str:
    """How a table was measured, in words."""
    clock = ""
    if not torch.cuda.is_available():
        clock = f" {torch.get_num_threads()} thread; seconds are those that the training process computed."
    windows = f"{options.rounds} rounds of {options.windows} windows of {options.steps} steps after {options.warm_up}"
    return (
        f"{resolution} x {resolution} pixels, {batch} samples a step on {dist.get_world_size()} ranks, {windows}."
        f"{clock} Losses: mean of all steps. Peak memory: tensors on the first rank."
    )


if __name__ == "__main__":
    main()
