"""Whether low-precision norms change what a run learns: `openmoji_unet` with them and with 32-bit norms.

    python benchmarks/norm_losses.py                                    # after make quickstart, which makes the latents
    python benchmarks/norm_losses.py --batches 2000 --seeds 5

Each seed trains twice from the same weights on the same batches and noise, under bfloat16 autocast; the validation loss
uses fixed noise. The table says "within noise" if the mean difference between the two is smaller than the standard
deviation between seeds. 32-bit norms are those of a GPU's autocast, also on a CPU.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import torch

from benchmarks.common import wide_norms
from benchmarks.common.baseline import LossRecord
from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.steady import watch
from data.system.log import log
from recipes.config.command_line import path_of
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.trainer import build_trainer

FULL, LOW = "32-bit norms", "low-precision norms"
CHANGES = {
    FULL: "algorithms.wide_norms={name: wide_norms}",
    LOW: "algorithms.low_precision_norms={name: low_precision_norms}",
}
OPENMOJI = ROOT / "runs" / "openmoji" / "latents"


def losses(recipe: Recipe) -> tuple[float, float]:
    """Validation loss at the end, and mean training loss of the second half."""
    recipe.callbacks, recipe.loggers = {}, {}
    trainer = build_trainer(recipe)
    training: list[float] = []
    watch(trainer, LossRecord(training))
    trainer.fit()
    trainer.close()
    return float(trainer.state.eval_metric_values["loss"]), statistics.mean(training[len(training) // 2 :])


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", type=path_of, default=OPENMOJI, help="folder with train/ and val/")
    parser.add_argument("--batches", type=positive, default=2000 if gpu else 100, help="batches per run")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each kind")
    parser.add_argument("changes", nargs="*", help="key=value overrides of the recipe")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds: give 2 or more, or the variation between seeds is not known")
    if not options.latents.is_dir():
        parser.error(f"--latents: no folder {options.latents}; run make quickstart, or name another")
    wide_norms.register()
    rows = []
    for seed in range(options.seeds):
        row: dict[str, Any] = {"seed": seed}
        for name, change in CHANGES.items():
            with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log.txt", "w", encoding="utf-8") as output:
                recipe = load_config(
                    ROOT / "yamls" / "openmoji_unet.yaml",
                    [
                        f"data.streams.train.path={options.latents}/train",
                        f"evals.val.streams.val.path={options.latents}/val",
                        f"output={folder}/run",
                        f"seed={seed}",
                        f"training.duration={options.batches}ba",
                        "training.eval_every=null",
                        "training.precision=amp_bf16",
                        "checkpoints.save=false",
                        "schedule.warmup=10ba",
                        "algorithms.scheduled_ema=null",
                        *options.changes,
                        change,
                    ],
                    Recipe,
                )
                with contextlib.redirect_stdout(output):
                    row[f"validation, {name}"], row[f"training, {name}"] = losses(recipe)
        rows.append(row | {f"{of} difference": row[f"{of}, {LOW}"] - row[f"{of}, {FULL}"] for of in OF})
        log.info(f"seed {seed}: " + ", ".join(f"{of} {rows[-1][f'{of} difference']:+.2e}" for of in OF))
    text = "\n".join([f"{options.batches} batches of {options.latents.name}.", *(verdict(rows, of) for of in OF)])
    write_results("norm_losses", "openmoji", [{k: _short(v) for k, v in row.items()} for row in rows], text)
    return rows


OF = ("validation", "training")


def verdict(rows: list[dict[str, Any]], of: str) -> str:
    """Whether the norms change a loss by less than another seed does."""
    change = statistics.mean(row[f"{of} difference"] for row in rows)
    noise = statistics.stdev(row[f"{of}, {FULL}"] for row in rows)
    outcome = "within noise" if abs(change) < noise else "NOT within noise"
    return (
        f"{of.capitalize()} loss: low-precision norms change it by {change:+.2e} on average, another seed by "
        f"{noise:.2e} (standard deviation of {len(rows)}): {outcome}."
    )


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
