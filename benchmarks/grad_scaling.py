"""Training curves in 32 bits, with one gradient scale for all blocks in fp16, and with a scale for each block.

    python benchmarks/grad_scaling.py                  # after make quickstart-tokens, which makes the tokens
    python benchmarks/grad_scaling.py --batches 1000 --charts docs

DALL-E's transformer on OpenMoji's tokens, twice: as it is, and with gradients that fall by 2^SPAN from the first block
to the last inside of the backward pass. A model that a CPU trains has gradients that lie closer together than fp16's
range, and one scale loses next to nothing of them. In the published one "the true exponents of the activation gradients
for later resblocks can fall below the minimum exponent of the 16-bit format" (Ramesh et al. 2021, section 2.4). The
fall is made by powers of two, which are taken out of the finished gradients: in 32 bits no bit differs.

All three train from the same weights on the same batches. The scales start where a long run would have brought them,
below the largest gradients of the run in 32 bits: each block's below its own, the one for all below the largest of all.
From there on they follow their rules, the published one and torch.amp.GradScaler's.
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

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks import scalings
from benchmarks.baseline import Losses
from benchmarks.reporting import write_results
from callbacks.charts import DPI, write_chart
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.trainer import build_trainer

FULL, ONE, EACH = "32 bits", "fp16, one scale", "fp16, a scale a block"
COLOURS = {FULL: "black", ONE: "crimson", EACH: "tab:blue"}
FP16_END = 16  # exponent of the least number that is too large
COUNTED = 30  # batches of a run whose gradients are
OPENMOJI = ROOT / "runs" / "openmoji"


@dataclass
class Run:
    """What a training run left.

    Attributes:
        losses: of each batch.
        validation: loss at the end.
        zeros: (blocks,) share of each block's gradients that were zero, over the batches that were counted.
        largest: (blocks,) exponent of each block's largest gradient, 0 where all were zero.
        skipped: updates.
    """

    losses: list[float]
    validation: float
    zeros: list[float]
    largest: list[int]
    skipped: int


def train(options: argparse.Namespace, span: float, algorithm: str | None, output: Path) -> Run:
    """A run of the recipe with one of the algorithms; `output` keeps what callbacks write."""
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
        f"schedule.warmup={max(1, options.batches // 10)}ba",
        "checkpoints.save=false",
        "algorithms.scheduled_ema=null",
        f"algorithms.span={{name: wide_gradients, span: {float(span)}}}",
        f"algorithms.scaling={algorithm or 'null'}",
        f"callbacks.exponents={{name: exponents, every: {max(1, options.batches // COUNTED)}ba}}",
        "callbacks.scales=" + ("{name: gradient_scales}" if algorithm else "null"),
        *options.changes,
    ]
    recipe = load_config(ROOT / "yamls" / "openmoji_dalle.yaml", changes, Recipe)
    recipe.callbacks = {name: recipe.callbacks[name] for name in ("exponents", "scales") if name in recipe.callbacks}
    recipe.loggers = {}
    trainer = build_trainer(recipe)
    losses: list[float] = []
    trainer.state.callbacks.append(Losses(losses))
    with contextlib.nullcontext() if torch.cuda.is_available() else scalings.WideProducts():
        trainer.fit()
    trainer.close()
    scaling = next((a for a in trainer.state.algorithms[0].levers if isinstance(a, ResblockGradScaling)), None)
    validation = float(trainer.state.eval_metric_values["loss"])
    return Run(losses, validation, *counted(output), 0 if scaling is None else scaling.skipped)


def counted(output: Path) -> tuple[list[float], list[int]]:
    """Share of zeros and largest exponent of each block's gradients, over all histograms of a run."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in (output / "exponents").glob("*.json")]
    blocks = list(zip(*(record["blocks"] for record in records), strict=True))
    zeros = [sum(b["zeros"] for b in block) / sum(b["elements"] for b in block) for block in blocks]
    found = [[int(exponent) for b in block for exponent in b["exponents"]] for block in blocks]
    largest = [max(exponents, default=0) for exponents in found]
    return zeros, largest


def compare(options: argparse.Namespace, span: float, folder: Path) -> dict[str, Run]:
    """The three, from the same weights on the same batches."""
    runs = {FULL: train(options, span, None, folder / "full")}
    starts = [float(FP16_END - options.room - largest) for largest in runs[FULL].largest]
    runs[ONE] = train(options, span, f"{{name: global_scaling, start: {min(starts)}}}", folder / "one")
    runs[EACH] = train(options, span, f"{{name: started_scaling, starts: {starts}}}", folder / "each")
    return runs


def row(span: float, kind: str, run: Run, full: Run) -> dict[str, Any]:
    """A line of the table."""
    final = statistics.mean(run.losses[-len(run.losses) // 5 :])
    return {
        "gradients fall by": f"2^{span:g}" if span else "as they are",
        "training": kind,
        "training loss, last fifth": round(final, 4),
        "validation loss": round(run.validation, 4),
        "above 32 bits": round(run.validation - full.validation, 4),
        "gradients that are zero, %": round(100 * statistics.mean(run.zeros), 3),
        "in the last block, %": round(100 * run.zeros[-1], 3),
        "skipped updates": run.skipped,
    }


def chart(found: dict[float, dict[str, Run]]) -> Figure:
    """Training losses, and shares of zeros over depth; a column for each range."""
    figure = Figure(figsize=(4.5 * len(found), 6), dpi=DPI, layout="constrained")
    axes = figure.subplots(2, len(found), sharey="row", squeeze=False, height_ratios=[2, 1])
    for column, (span, runs) in zip(axes.T, found.items(), strict=True):
        for kind, run in runs.items():
            window = max(1, len(run.losses) // 20)
            smooth = np.convolve(run.losses, np.full(window, 1 / window), "valid")
            style = "--" if kind == EACH else "-"
            column[0].plot(np.arange(len(smooth)) + window, smooth, style, color=COLOURS[kind], label=kind)
            column[1].plot(np.array(run.zeros) * 100, style, color=COLOURS[kind])
        title = f"gradients fall by 2^{span:g} over the depth" if span else "gradients as they are"
        column[0].set_title(title, fontsize="medium")
        column[0].set_xlabel(f"update (means of {window})")
        column[1].set_xlabel("block")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("gradients that are zero, %")
    axes[0, 0].legend(fontsize="small")
    return figure


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, default=OPENMOJI / "tokens", help="folder with train/ and val/")
    parser.add_argument("--vocabulary", type=Path, default=OPENMOJI / "vocabulary.json", help="of the captions")
    parser.add_argument("--layers", type=int, default=6, help="of attention, each with an MLP")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batches", type=int, default=400, help="length of a run")
    parser.add_argument("--batch", type=int, default=8, help="samples")
    parser.add_argument("--spans", type=float, nargs="+", default=[0, 60], help="log2 of how far gradients fall, each")
    room = "log2 of what the scales leave at the start between the largest gradients that were counted and fp16's end"
    parser.add_argument("--room", type=int, default=9, help=room)
    parser.add_argument("--charts", type=Path, help="folder for PNGs: curves, exponents and scales")
    parser.add_argument("changes", nargs="*", help="key=value overrides of the recipe")
    options = parser.parse_args(arguments)
    for path in (options.tokens, options.vocabulary):
        if not path.exists():
            parser.error(f"no {path}; run make quickstart-tokens, or name others by --tokens and --vocabulary")
    scalings.register()
    found, rows = {}, []
    for span in options.spans:
        with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log.txt"), "w", encoding="utf-8") as log:
            with contextlib.redirect_stdout(log):
                found[span] = compare(options, span, Path(folder))
            if options.charts is not None:  # those of the last span stay
                keep_charts(Path(folder), options.charts)
        rows += [row(span, kind, run, found[span][FULL]) for kind, run in found[span].items()]
        print(f"2^{span:g}: " + ", ".join(f"{r['training']} {r['validation loss']}" for r in rows[-3:]), flush=True)
    if options.charts is not None:
        write_chart(chart(found), options.charts / "grad_scaling.png")
    notes = (
        f"{options.batches} batches of {options.batch} of {options.tokens.parent.name}'s tokens, {2 * options.layers} "
        f"blocks of width {options.width}; one seed. Zeros are counted in the blocks' matrices, every "
        f"{max(1, options.batches // COUNTED)} batches."
    )
    write_results("grad_scaling", f"d{options.width}-{options.batches}ba", rows, notes)
    return rows


def keep_charts(folder: Path, charts: Path) -> None:
    """The last histograms of the run with a scale a block, and its scales."""
    charts.mkdir(parents=True, exist_ok=True)
    sources = {
        "exponents.png": max((folder / "each" / "exponents").glob("*.png")),
        "gradient_scales.png": folder / "each" / "gradient_scales.png",
    }
    for name, source in sources.items():
        shutil.copyfile(source, charts / name)


if __name__ == "__main__":
    main()
