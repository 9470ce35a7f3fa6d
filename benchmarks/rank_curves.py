"""Training loss by PowerSGD's rank: the first batches of OpenMoji's transformer on two ranks, each a machine.

    composer -n 2 benchmarks/rank_curves.py            # after make quickstart-tokens, which makes the tokens
    composer -n 2 benchmarks/rank_curves.py --ranks 40 8 --batches 300

All runs have the same initial weights, batches and learning rates, those of the beginning of a run of 2,400 batches of
yamls/openmoji_dalle.yaml with AdamW, as Ramesh et al. 2021 compared ranks over the first tenth of training. One more
run with plain averaging and another seed shows the variation between seeds. Curves are means over the last few batches.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

from composer import Callback as ComposerCallback
from composer import Logger, State
from composer.utils import dist
from matplotlib.figure import Figure

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.steady import free_memory, run_until, shared_folder
from benchmarks.network_rank import bytes_by_formula
from callbacks.charts import DPI, write_chart
from data.system.log import log
from recipes.config.build import build_on_meta
from recipes.config.command_line import path_of
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.trainer import build_trainer

OPENMOJI = ROOT / "runs" / "openmoji"
PLAIN, OTHER_SEED = "plain averaging", "plain averaging, another seed"


class Curve(ComposerCallback):
    """Records the training loss of every batch, averaged over ranks, and ends the run after a number of batches.

    Attributes:
        losses: total loss of text and image tokens, in nats per token.
        seconds: wall time of each batch.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.began = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now
        total = state.total_loss_dict["loss/train/total"]
        self.losses.append(statistics.mean(dist.all_gather_object(float(total))))
        if len(self.losses) == self.batches:
            state.stop_training()


def recipe_of(options: argparse.Namespace, folder: str, changes: list[str]) -> Recipe:
    """The shipped recipe without validation during the run, checkpoints and callbacks."""
    recipe = load_config(
        ROOT / "yamls" / "openmoji_dalle.yaml",
        [
            f"data.streams.train.path={options.tokens}/train",
            f"data.vocabulary={options.vocabulary}",
            f"evals.val.streams.val.path={options.tokens}/val",
            f"evals.val.vocabulary={options.vocabulary}",
            f"output={folder}/run",
            # As published. Steps of muon have the same size whatever the gradients lost.
            "optimizer={name: adamw, lr: 1.5e-3, betas: [0.9, 0.96], weight_decay: 4.5e-2}",
            "schedule.warmup=100ba",
            "training.duration=2400ba",
            "training.eval_every=null",
            "checkpoints.save=false",
            "algorithms.scheduled_ema=null",
            *options.changes,
            *changes,
        ],
        Recipe,
    )
    recipe.callbacks, recipe.loggers = {}, {}
    return recipe


def variants(ranks: list[int]) -> dict[str, list[str]]:
    """The overrides of each run, by its name."""
    clip = "training.grad_clip=null"  # PowerSGD has its own
    return {
        PLAIN: [],
        OTHER_SEED: ["seed=18"],
        **{f"rank {r}": [f"algorithms.powersgd={{name: powersgd, rank: {r}, clip: 4.0}}", clip] for r in ranks},
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=path_of, default=OPENMOJI / "tokens", help="folder with train/ and val/")
    parser.add_argument("--vocabulary", type=path_of, default=OPENMOJI / "vocabulary.json")
    parser.add_argument(
        "--ranks", type=positive, nargs="+", default=[64, 32, 16, 8, 4], help="ranks of the compression"
    )
    parser.add_argument("--batches", type=positive, default=150, help="batches per run")
    parser.add_argument("--window", type=positive, default=20, help="batches averaged per point of a curve")
    parser.add_argument("--note", default="", help="a remark for the table, such as other load on the machine")
    parser.add_argument("changes", nargs="*", help="key=value overrides of the recipe")
    options = parser.parse_args(arguments)
    if not 1 <= options.window <= options.batches:
        parser.error(f"--window: {options.window}; give 1 to {options.batches}, the batches per run")
    for path in (options.tokens, options.vocabulary):
        if not path.exists():
            parser.error(f"{path} is not there; run make quickstart-tokens, or name another")
    warnings.filterwarnings("ignore", message="Specifying `eval_interval")
    dist.initialize_dist("cpu", timeout=120.0)
    if dist.get_world_size() < 2:
        parser.error("one process averages nothing: composer -n 2 benchmarks/rank_curves.py")
    curves: dict[str, Curve] = {}
    validation: dict[str, float] = {}
    with shared_folder() as (folder, output):
        for name, changes in variants(options.ranks).items():
            recipe = recipe_of(options, folder, ["training.device=cpu", *changes])
            with contextlib.redirect_stdout(output):
                trainer = build_trainer(recipe)
                curves[name] = run_until(trainer, Curve(options.batches))
                validation[name] = float(trainer.state.eval_metric_values["loss"])
            del trainer
            free_memory()
            ends = (
                f"training {smoothed(curves[name].losses, options.window)[-1]:.4f}, validation {validation[name]:.4f}"
            )
            log.info(f"{name}: {ends}, {sum(curves[name].seconds):,.0f} s")
    return write_report(curves, validation, recipe, options)


def smoothed(losses: list[float], window: int) -> list[float]:
    """The running mean over `window` batches; the first value is that of the first `window` batches."""
    return [statistics.mean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def write_report(
    curves: dict[str, Curve], validation: dict[str, float], recipe: Recipe, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of the table. The first rank writes table and chart."""
    task, machines = build_on_meta(recipe.model), dist.get_world_size()
    ends = {name: smoothed(run.losses, options.window)[-1] for name, run in curves.items()}
    plain = bytes_by_formula(task, None, machines)
    rows = []
    for name, run in curves.items():
        rank = int(name.removeprefix("rank ")) if name.startswith("rank") else None
        sent = bytes_by_formula(task, rank, machines)
        rows.append(
            {
                "averaging": name,
                "MB sent per step": round(sent / 1e6, 3),
                "relative to plain": round(sent / plain, 3),
                "training loss": round(ends[name], 4),
                "difference to plain": f"{ends[name] - ends[PLAIN]:+.4f}",
                "validation loss": round(validation[name], 4),
                "validation difference to plain": f"{validation[name] - validation[PLAIN]:+.4f}",
                "ms per step": round(1e3 * statistics.median(run.seconds), 1),
            }
        )
    note = (
        f"{options.batches} of {recipe.training.duration.removesuffix('ba')} batches of {recipe.training.global_batch} "
        f"on {machines} ranks, width {recipe.model.args['width']}; training loss: mean of the last {options.window} "
        "batches; losses in nats per token. Both ranks are on one machine: step times show the computation of the "
        "compression, not the time that it saves on a network." + (f"\n{options.note}" if options.note else "")
    )
    if dist.get_global_rank() == 0:
        path = write_results("rank_curves", "openmoji", rows, note)
        draw({name: run.losses for name, run in curves.items()}, options.window, path.with_suffix(".png"))
    return rows


def draw(losses: dict[str, list[float]], window: int, path: Path) -> None:
    """Draw one curve per run."""
    figure = Figure(figsize=(6.4, 4.0), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for name, values in losses.items():
        style = (
            {"color": "black", "linestyle": "--" if name == OTHER_SEED else "-"} if name in (PLAIN, OTHER_SEED) else {}
        )
        points = smoothed(values, window)
        axes.plot(range(window, len(values) + 1), points, linewidth=1.2, label=name, **style)
    axes.set(xlabel="batch", ylabel=f"training loss, nats per token\n(mean of {window} batches)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    write_chart(figure, path)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the benchmark trains on the CPU, and the table says so
    main()
