"""Training curves in 32 bits, in fp16 with one gradient scale for all blocks, and in fp16 with one scale per block.

    python benchmarks/grad_scaling.py                  # after make quickstart-tokens, which makes the tokens
    python benchmarks/grad_scaling.py --batches 1000 --charts docs

DALL-E's transformer trains on OpenMoji's tokens, once as it is, and once with gradients that decrease by 2^SPAN from
the first block to the last during the backward pass. The gradients of a model that is small enough for a CPU span less
than the range of fp16, so that one scale loses almost none of them. In the published model "the true exponents of the
activation gradients for later resblocks can fall below the minimum exponent of the 16-bit format" (Ramesh et al. 2021,
section 2.4). The decrease is by powers of two, which are divided out of the complete gradients, so that 32-bit training
does not change by a bit.

All three runs start from the same weights and see the same batches. Scales start where a long run would have brought
them: the scale of each block is chosen by the largest gradient of this block in the 32-bit run, and the scale for all
blocks by the largest gradient of all. From there they follow the published rule and that of torch.amp.GradScaler.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.common import scalings
from benchmarks.common.baseline import LossRecord
from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.steady import watch
from callbacks.charts import DPI, write_chart
from data.system.log import log
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.config.command_line import path_of
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.adapters import RunLevers
from recipes.engines.composer.trainer import build_trainer
from recipes.engines.parts import the_one

FULL, ONE, EACH = "32 bits", "fp16, one scale", "fp16, one scale per block"
COLOURS = {FULL: "black", ONE: "crimson", EACH: "tab:blue"}
FP16_END = 16  # exponent of the smallest number that overflows
COUNTED = 30  # how many batches of a run have their gradients counted, about
OPENMOJI = ROOT / "runs" / "openmoji"


@dataclass
class Outcome:
    """The results of a training run.

    Attributes:
        losses: training loss of each batch.
        validation: validation loss at the end.
        zeros: (blocks,) share of each block's gradients that were zero, over the counted batches.
        largest: (blocks,) exponent of each block's largest gradient; 0 if all were zero.
        skipped: number of skipped updates.
    """

    losses: list[float]
    validation: float
    zeros: list[float]
    largest: list[int]
    skipped: int


def train(options: argparse.Namespace, span: float, lever: str | None, output: Path) -> Outcome:
    """Train the recipe with one of the levers, or without for None; callbacks write to `output`."""
    changes = [
        f"output={output}",
        f"data.streams.train.path={options.tokens}/train",
        f"evals.val.streams.val.path={options.tokens}/val",
        f"data.vocabulary={options.vocabulary}",
        f"evals.val.vocabulary={options.vocabulary}",
        "data.workers=0",
        f"model={{layers: {options.layers}, width: {options.width}, heads: 2}}",
        f"training={{duration: {options.batches}ba, global_batch: {options.batch}, precision: fp32}}",
        "training.eval_every=null",
        "optimizer={name: adamw, lr: 1.5e-3, betas: [0.9, 0.96], weight_decay: 4.5e-2}",  # as published
        f"schedule.warmup={max(1, options.batches // 10)}ba",
        "checkpoints.save=false",
        "algorithms.scheduled_ema=null",
        f"algorithms.wide_gradients={{name: wide_gradients, span: {float(span)}}}",
        *([] if lever is None else [f"algorithms.{lever}"]),
        f"callbacks.exponents={{name: exponents, every: {max(1, options.batches // COUNTED)}ba}}",
        "callbacks.gradient_scales=" + ("{name: gradient_scales}" if lever else "null"),
        *options.changes,
    ]
    recipe = load_config(ROOT / "yamls" / "openmoji_dalle.yaml", changes, Recipe)
    kept = ("exponents", "gradient_scales")
    recipe.callbacks = {label: callback for label, callback in recipe.callbacks.items() if label in kept}
    recipe.loggers = {}
    trainer = build_trainer(recipe)
    losses: list[float] = []
    watch(trainer, LossRecord(losses))
    with contextlib.nullcontext() if torch.cuda.is_available() else scalings.WideProducts():
        trainer.fit()
    trainer.close()
    (adapter,) = [algorithm for algorithm in trainer.state.algorithms if isinstance(algorithm, RunLevers)]
    scaling = the_one(adapter.levers, ResblockGradScaling)
    validation = float(trainer.state.eval_metric_values["loss"])
    return Outcome(losses, validation, *counted(output), 0 if scaling is None else scaling.skipped)


def counted(output: Path) -> tuple[list[float], list[int]]:
    """Share of zeros and largest exponent of the gradients of each block, over all histograms of a run."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in (output / "exponents").glob("*.json")]
    blocks = list(zip(*(record["blocks"] for record in records), strict=True))
    zeros = [sum(b["zeros"] for b in block) / sum(b["elements"] for b in block) for block in blocks]
    found = [[int(exponent) for b in block for exponent in b["exponents"]] for block in blocks]
    largest = [max(exponents, default=0) for exponents in found]
    return zeros, largest


def compare(options: argparse.Namespace, span: float, folder: Path) -> dict[str, Outcome]:
    """The three runs, from the same weights on the same batches."""
    runs = {FULL: train(options, span, None, folder / "full")}
    starts = [float(FP16_END - options.room - largest) for largest in runs[FULL].largest]
    runs[ONE] = train(options, span, f"global_scaling={{name: global_scaling, start: {min(starts)}}}", folder / "one")
    runs[EACH] = train(options, span, f"started_scaling={{name: started_scaling, starts: {starts}}}", folder / "each")
    return runs


def row(span: float, kind: str, run: Outcome, full: Outcome) -> dict[str, Any]:
    """A row of the table."""
    final = statistics.mean(run.losses[-len(run.losses) // 5 :])
    return {
        "gradients decrease by": f"2^{span:g}" if span else "as they are",
        "training": kind,
        "training loss, last fifth": round(final, 4),
        "validation loss": round(run.validation, 4),
        "difference to 32 bits": round(run.validation - full.validation, 4),
        "gradients that are zero, %": round(100 * statistics.mean(run.zeros), 3),
        "in the last block, %": round(100 * run.zeros[-1], 3),
        "skipped updates": run.skipped,
    }


def chart(found: dict[float, dict[str, Outcome]]) -> Figure:
    """Training losses, and shares of zeros over depth; one column per span."""
    figure = Figure(figsize=(4.5 * len(found), 6), dpi=DPI, layout="constrained")
    axes = figure.subplots(2, len(found), sharey="row", squeeze=False, height_ratios=[2, 1])
    for column, (span, runs) in zip(axes.T, found.items(), strict=True):
        for kind, run in runs.items():
            window = max(1, len(run.losses) // 20)
            smooth = np.convolve(run.losses, np.full(window, 1 / window), "valid")
            style = "--" if kind == EACH else "-"
            column[0].plot(np.arange(len(smooth)) + window, smooth, style, color=COLOURS[kind], label=kind)
            column[1].plot(np.array(run.zeros) * 100, style, color=COLOURS[kind])
        title = f"gradients decrease by 2^{span:g} over the depth" if span else "gradients as they are"
        column[0].set_title(title, fontsize="medium")
        column[0].set_xlabel(f"update (mean of {window})")
        column[1].set_xlabel("block")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("gradients that are zero, %")
    axes[0, 0].legend(fontsize="small")
    return figure


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=path_of, default=OPENMOJI / "tokens", help="folder with train/ and val/")
    parser.add_argument("--vocabulary", type=path_of, default=OPENMOJI / "vocabulary.json", help="of the captions")
    parser.add_argument("--layers", type=positive, default=6, help="attention layers, each with an MLP")
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--batches", type=positive, default=400, help="batches per run")
    parser.add_argument("--batch", type=positive, default=8, help="samples per batch")
    parser.add_argument("--spans", type=float, nargs="+", default=[0, 60], help="log2 of the decrease of gradients")
    room = "log2 of the margin between the largest counted gradients, scaled, and the end of fp16's range at the start"
    parser.add_argument("--room", type=int, default=9, help=room)
    parser.add_argument("--charts", type=path_of, help="folder for charts (PNG): curves, exponents and scales")
    parser.add_argument("changes", nargs="*", help="key=value overrides of the recipe")
    options = parser.parse_args(arguments)
    for path in (options.tokens, options.vocabulary):
        if not path.exists():
            parser.error(f"no {path}; run make quickstart-tokens, or give other paths by --tokens and --vocabulary")
    scalings.register()
    found, rows = {}, []
    for span in options.spans:
        with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log.txt"), "w", encoding="utf-8") as output:
            with contextlib.redirect_stdout(output):
                found[span] = compare(options, span, Path(folder))
            if options.charts is not None:  # those of the last span remain
                keep_charts(Path(folder), options.charts)
        rows += [row(span, kind, run, found[span][FULL]) for kind, run in found[span].items()]
        log.info(f"2^{span:g}: " + ", ".join(f"{r['training']} {r['validation loss']}" for r in rows[-3:]))
    if options.charts is not None:
        write_chart(chart(found), options.charts / "grad_scaling.png")
    notes = (
        f"{options.batches} batches of {options.batch} of {options.tokens.parent.name}'s tokens, {2 * options.layers} "
        f"blocks of width {options.width}; one seed. Zeros are counted in the matrices of blocks, every "
        f"{max(1, options.batches // COUNTED)} batches."
    )
    write_results("grad_scaling", f"d{options.width}-{options.batches}ba", rows, notes)
    return rows


def keep_charts(folder: Path, charts: Path) -> None:
    """Copy the charts of the run with one scale per block: its last histograms and its scales."""
    charts.mkdir(parents=True, exist_ok=True)
    sources = {
        "exponents.png": max((folder / "each" / "exponents").glob("*.png")),
        "gradient_scales.png": folder / "each" / "gradient_scales.png",
    }
    for name, source in sources.items():
        shutil.copyfile(source, charts / name)


if __name__ == "__main__":
    main()
