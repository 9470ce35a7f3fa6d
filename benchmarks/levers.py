"""Speedup by each throughput lever: yamls/sd2_base.yaml from a plain baseline on, lever by lever.

    python benchmarks/levers.py                                        # a small network on a CPU
    python benchmarks/levers.py --size sd2 --resolution 256 512 --batch 256 --microbatch 32
    composer -n 8 benchmarks/levers.py --size sd2 --batch 2048 --microbatch 32

The baseline encodes images and captions in every step, has 32-bit norms and eager attention, and updates Composer's EMA
after every batch. Each row of the table adds a lever to those of the rows before. All runs train the same network from
the same weights on the same batches with the same noise, with the Trainer that the recipe builds. They take turns, in
alternating order, so that other load on the machine affects all of them. Only whole steps after a warm-up count.
"""

import argparse
import contextlib
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import torch
import yaml
from composer.utils import dist

from benchmarks.common import baseline
from benchmarks.common.latent_sets import encoder_components, write_set
from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.steady import Steady, free_memory, on_first_rank, run_until, shared_folder
from benchmarks.common.training import SIZES, flops, recipe_with
from data.system.log import log
from recipes.algorithms.modules.compile import why_no_compiler
from recipes.config.recipe import Recipe
from recipes.engines.composer.trainer import build_trainer

LATER = ("lean_blocks", "fused_geglu", "working_weights", "cudnn_benchmark")


@dataclass(frozen=True)
class Addition:
    """Changes of the recipe on top of those of the rows before.

    Attributes:
        name: name of the row in the table.
        changes: `key=value` overrides.
        missing: why it cannot run here; empty if it can.
    """

    name: str
    changes: list[str]
    missing: str = ""


@dataclass
class RowRuns:
    """The measurements of one row: its runs in all rounds.

    Attributes:
        rounds: one list per round with samples/s of each window.
        losses: loss of every step of the first round.
        repeat: largest difference between the losses of a step in two rounds.
        peak: peak memory in bytes.
        error: why there are no measurements; empty if there are.
    """

    rounds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    repeat: float = 0.0
    peak: int = 0
    error: str = ""


def additions(folder: Path, resolution: int, repeat: float, gpu: bool) -> list[Addition]:
    """The baseline and the levers, in the order of the table.

    Args:
        folder: written by `write_set`.
        resolution: side of the images in pixels.
        repeat: how often an epoch contains each sample.
        gpu: whether there is a GPU.
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
        Addition(
            "baseline",
            [
                f"data={_flow(plain_data)}",
                "algorithms.channels_last=null",
                "algorithms.low_precision_norms=null",
                "algorithms.fused_group_norm=null",
                *(f"algorithms.{name}=null" for name in LATER),
                "algorithms.attention.implementation=eager",
                "algorithms.composer_ema={name: composer_ema, decay: 0.9999}",
                "optimizer.fused=false",
            ],
        ),
        Addition("precomputed latents", [f"data={_flow({'name': 'latents', **data})}"]),
        Addition(
            "scheduled EMA",
            [
                "algorithms.composer_ema=null",
                "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9999, last: 50000ba}",
            ],
        ),
        Addition("attention", ["algorithms.attention.implementation=auto"]),
        Addition("channels_last", ["algorithms.channels_last={name: channels_last}"]),
        Addition("low-precision norms", ["algorithms.low_precision_norms={name: low_precision_norms}"], no_gpu),
        Addition(
            "fused GroupNorm + SiLU", ["algorithms.fused_group_norm={name: fused_group_norm, when: auto}"], no_gpu
        ),
        Addition("lean blocks", ["algorithms.lean_blocks={name: lean_blocks}"]),
        Addition("GEGLU in one kernel", ["algorithms.fused_geglu={name: fused_geglu}"], no_gpu),
        Addition("working weights", ["algorithms.working_weights={name: working_weights}"], no_gpu),
        Addition("cuDNN benchmark", ["algorithms.cudnn_benchmark={name: cudnn_benchmark}"], no_gpu),
        Addition("fused AdamW", ["optimizer.fused=true"]),
        Addition("torch.compile", ["algorithms.compile={name: compile}"], why_no_compiler(gpu) or ""),
        Addition("averages by block", ["algorithms.averages={name: block_all_reduce}"], one_rank),
        Addition("CUDA graphs", ["algorithms.graphs={name: cuda_graphs}"], no_gpu),
        Addition(
            "FSDP SHARD_GRAD_OP",
            [
                "algorithms.averages=null",
                "algorithms.graphs=null",
                "training.fsdp={strategy: SHARD_GRAD_OP}",
            ],
            one_rank,
        ),
    ]


def _flow(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, default_flow_style=True, width=10**6).strip()


def measure(recipes: dict[str, Recipe], rounds: int, steady: tuple[int, int, int], output: Any) -> dict[str, RowRuns]:
    """Train every recipe `rounds` times, in turns.

    Args:
        recipes: recipes by the name of the row.
        rounds: number of runs of each.
        steady: arguments of `Steady`.
        output: file for what the runs print.
    """
    found = {name: RowRuns() for name in recipes}
    for number in range(rounds):
        for name in list(recipes) if number % 2 == 0 else reversed(recipes):
            measured = found[name]
            if measured.error:
                continue
            try:
                with contextlib.redirect_stdout(output):
                    run = run_until(build_trainer(recipes[name]), Steady(*steady))
            except torch.OutOfMemoryError:
                measured.error = "out of memory"
                run = None
            if run is not None:
                measured.rounds.append(run.rates)
                measured.peak = max(measured.peak, run.peak)
                measured.losses = measured.losses or run.losses
                differences = [abs(a - b) for a, b in zip(measured.losses, run.losses, strict=True)]
                measured.repeat = max(measured.repeat, *differences)
                log.info(f"round {number + 1} of {rounds}, {name}: {statistics.median(run.rates):,.2f} samples/s")
            del run
            free_memory()
    return found


def table_rows(found: dict[str, RowRuns]) -> Iterator[dict[str, Any]]:
    """The rows of the table; speeds are compared between runs of the same round."""
    first = previous = next(iter(found.values()))
    for name, measured in found.items():
        if name == OTHER_SEED:
            continue
        rates = sorted(rate for windows in measured.rounds for rate in windows)
        if measured.error or first.error:
            yield dict.fromkeys(COLUMNS, "") | {"lever": name, "images/s": measured.error or round(_middle(rates), 2)}
            continue
        differences = [a - b for a, b in zip(measured.losses, first.losses, strict=True)]
        yield {
            "lever": name,
            "images/s": round(_middle(rates), 2),
            "middle half": f"{rates[len(rates) // 4]:,.2f} to {rates[-1 - len(rates) // 4]:,.2f}",
            "relative to previous": round(ratio(measured, previous), 3),
            "relative to baseline": round(ratio(measured, first), 3),
            "peak MB": round(measured.peak / 1e6, 1),
            "loss": round(statistics.mean(measured.losses), 5),
            "loss difference": f"{statistics.mean(differences):+.1e}",
            "largest per step": f"{max(map(abs, differences)):.1e}",
            "between rounds": f"{measured.repeat:.1e}",
        }
        previous = measured


OTHER_SEED = "another seed"
COLUMNS = ("lever", "images/s", "middle half", "relative to previous", "relative to baseline", "peak MB")
COLUMNS += ("loss", "loss difference", "largest per step", "between rounds")


def _middle(rates: list[float]) -> float:
    return statistics.median(rates) if rates else 0.0


def ratio(one: RowRuns, other: RowRuns) -> float:
    """The speed of `one` relative to `other`: the median over rounds."""
    pairs = zip(one.rounds, other.rounds, strict=False)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def notes(found: dict[str, RowRuns], chosen: list[Addition], counts: dict[str, float], text: str) -> str:
    """The text below the table."""
    encoding = counts["VAE"] + counts["text encoder"]
    work = ", ".join(f"{name} {count:,.2f}" for name, count in counts.items())
    share = encoding / counts["training of the U-Net"]
    lines = [text, f"GFLOP per sample: {work}; encoding takes {share:.2f} of those of training."]
    first, second = list(found.values())[:2]
    if not (first.error or second.error):
        gain = ratio(second, first)
        verdict = "met" if gain >= 1.4 else "not met"
        lines.append(f"Goal: precomputed latents at least 1.4x encoders in the loop: {gain:.2f}x, {verdict}.")
    if found[OTHER_SEED].losses:
        lines.append(f"With another seed the loss is {statistics.mean(found[OTHER_SEED].losses):.5f}.")
    lines += [f"Not run here: {lever.name} ({lever.missing})." for lever in chosen if lever.missing]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[int, dict[str, RowRuns]]:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="sd2" if gpu else "small")
    parser.add_argument("--resolution", type=positive, nargs="+", help="sides of the images in pixels")
    parser.add_argument("--batch", type=positive, help="samples per step, over all ranks")
    parser.add_argument("--microbatch", type=positive, help="samples per microbatch and device; default: all")
    parser.add_argument("--samples", type=positive, help="images in the set; default: four batches")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each row")
    parser.add_argument("--warm-up", type=int, default=20 if gpu else 3, help="steps before the first window")
    parser.add_argument("--windows", type=positive, default=5 if gpu else 4, help="windows per run")
    parser.add_argument("--steps", type=positive, default=10 if gpu else 1, help="steps per window")
    parser.add_argument("--skip", nargs="+", default=[], metavar="LEVER", help="names of levers to leave out")
    options = parser.parse_args(arguments)
    if options.warm_up < 2:
        parser.error(f"--warm-up: {options.warm_up}; give 2 or more")
    if any(resolution % 64 for resolution in options.resolution or ()):
        parser.error("--resolution: give multiples of 64")
    size = SIZES[options.size]
    batch = options.batch or size.batch
    samples = options.samples or 4 * batch
    resolutions = options.resolution or size.resolutions
    warnings.filterwarnings("ignore", message="Specifying `eval_interval")
    dist.initialize_dist("gpu" if gpu else "cpu")
    baseline.register()
    with shared_folder() as (folder, output):
        with contextlib.redirect_stdout(output):
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
            # A single epoch, so that the time between epochs is not measured.
            repeat = 1 + math.ceil((options.warm_up + options.windows * options.steps) * batch / samples)
            chosen = additions(folder / "set", resolution, repeat, gpu)
            unknown = [name for name in options.skip if name not in [lever.name for lever in chosen[2:]]]
            if unknown:
                parser.error(
                    f"--skip: no lever {unknown[0]}; there are {', '.join(lever.name for lever in chosen[2:])}"
                )
            chosen = [replace(lever, missing="skipped") if lever.name in options.skip else lever for lever in chosen]
            found = run_levers(chosen, recipe_of, options, output)
            everything[resolution] = found
            if dist.get_global_rank() == 0:
                rows = list(table_rows(found))
                counts = flops(size, recipe_of([]), resolution)
                name = options.size if [resolution] == size.resolutions else f"{options.size}_{resolution}"
                write_results(
                    "levers", name, rows, notes(found, chosen, counts, conditions(resolution, batch, options))
                )
    return everything


def run_levers(
    chosen: list[Addition], recipe_of: Callable[[list[str]], Recipe], options: Any, output: Any
) -> dict[str, RowRuns]:
    """The runs of all rows that can run here, and one run with another seed, for comparing losses.

    Args:
        chosen: the rows.
        recipe_of: from overrides to a recipe.
        options: of the command line.
        output: file for what the runs print.
    """
    recipes: dict[str, Recipe] = {}
    changes: list[str] = []
    for lever in chosen:
        if not lever.missing:
            changes = changes + lever.changes
            recipes[lever.name] = recipe_of(changes)
    steady = (options.warm_up, options.windows, options.steps)
    found = measure(recipes, options.rounds, steady, output)
    second = recipe_of([*chosen[0].changes, *chosen[1].changes, "seed=18"])
    return found | measure({OTHER_SEED: second}, 1, steady, output)


def conditions(resolution: int, batch: int, options: Any) -> str:
    """How the table was measured, in words."""
    clock = ""
    if not torch.cuda.is_available():
        clock = f" {torch.get_num_threads()} thread; rates are by the CPU time of the training process."
    windows = f"{options.rounds} rounds of {options.windows} windows of {options.steps} steps after {options.warm_up}"
    return (
        f"{resolution} x {resolution} pixels, {batch} samples per step on {dist.get_world_size()} ranks, {windows}."
        f"{clock} Losses: mean over all steps. Peak memory: tensors on the first rank."
    )


if __name__ == "__main__":
    main()
