"""Loss against PowerSGD's rank: OpenMoji's transformer, its first batches, on two ranks that are two machines.

    composer -n 2 benchmarks/rank_curves.py            # after make quickstart-tokens, which makes the tokens
    composer -n 2 benchmarks/rank_curves.py --ranks 40 8 --batches 300

All runs have the same first weights, batches and learning rates: those of yamls/openmoji_dalle.yaml at its length, of
which they see the beginning, as Ramesh et al. 2021 compared ranks over the first tenth of training. One more run with
plain averaging and another seed shows what chance does. Curves are means over the last few batches.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from composer import Callback, Logger, State
from composer.utils import dist

from benchmarks.network_rank import bytes_by_formula
from benchmarks.plots import chart, save
from benchmarks.reporting import write_results
from benchmarks.steady import let_go, on_first_rank, run_steady, say
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.trainer import build_trainer

OPENMOJI = ROOT / "runs" / "openmoji"
PLAIN, OTHER_SEED = "plain averaging", "plain averaging, another seed"


class Losses(Callback):
    """Keeps the training loss of every batch, a mean over ranks, and ends the run after some batches.

    Attributes:
        losses: total, of text and of image tokens, nats a token.
        seconds: of each batch.
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
    """The shipped recipe with nothing beside training."""
    recipe = load_config(
        ROOT / "yamls" / "openmoji_dalle.yaml",
        [
            f"data.streams.train.path={options.tokens}/train",
            f"data.vocabulary={options.vocabulary}",
            f"evals.val.streams.val.path={options.tokens}/val",
            f"evals.val.vocabulary={options.vocabulary}",
            f"output={folder}/run",
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
    """The overrides that make each run."""
    clip = "training.grad_clip=null"  # PowerSGD's own
    return {
        PLAIN: [],
        OTHER_SEED: ["seed=18"],
        **{f"rank {r}": [f"algorithms.averaging={{name: powersgd, rank: {r}, clip: 4.0}}", clip] for r in ranks},
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, default=OPENMOJI / "tokens", help="folder with train/ and val/")
    parser.add_argument("--vocabulary", type=Path, default=OPENMOJI / "vocabulary.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 32, 16, 8, 4], help="of the compression")
    parser.add_argument("--batches", type=int, default=150, help="of each run")
    parser.add_argument("--window", type=int, default=20, help="batches whose mean is a point of a curve")
    parser.add_argument("--note", default="", help="for readers of the table: what else the machine did")
    parser.add_argument("changes", nargs="*", help="key=value overrides of the recipe")
    options = parser.parse_args(arguments)
    if not 1 <= options.window <= options.batches:
        parser.error(f"--window: {options.window}; give 1 to {options.batches}, the batches of a run")
    for path in (options.tokens, options.vocabulary):
        if not path.exists():
            parser.error(f"{path} is not there; run make quickstart-tokens, or name another")
    warnings.filterwarnings("ignore", message="Specifying `eval_interval")
    dist.initialize_dist("cpu", timeout=120.0)
    if dist.get_world_size() < 2:
        parser.error("one process averages nothing: composer -n 2 benchmarks/rank_curves.py")
    curves: dict[str, Losses] = {}
    validation: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        folder = on_first_rank(lambda: stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(open(Path(folder, f"log{dist.get_global_rank()}.txt"), "w", encoding="utf-8"))
        for name, changes in variants(options.ranks).items():
            recipe = recipe_of(options, folder, ["training.device=cpu", *changes])
            with contextlib.redirect_stdout(log):
                trainer = build_trainer(recipe)
                curves[name] = run_steady(trainer, Losses(options.batches))
                validation[name] = float(trainer.state.eval_metric_values["loss"])
            del trainer
            let_go()
            ends = (
                f"training {smoothed(curves[name].losses, options.window)[-1]:.4f}, validation {validation[name]:.4f}"
            )
            say(f"{name}: {ends}, {sum(curves[name].seconds):,.0f} s")
        dist.barrier()
    return report(curves, validation, recipe, options)


def smoothed(losses: list[float], window: int) -> list[float]:
    """The mean of each batch and those before it, as many as the window holds; none before there are as many."""
    return [statistics.mean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def report(
    curves: dict[str, Losses], validation: dict[str, float], recipe: Recipe, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Table and chart, on the first rank."""
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
                "MB sent a step": round(sent / 1e6, 3),
                "of plain": round(sent / plain, 3),
                "training loss": round(ends[name], 4),
                "to plain": f"{ends[name] - ends[PLAIN]:+.4f}",
                "validation loss": round(validation[name], 4),
                "to plain's": f"{validation[name] - validation[PLAIN]:+.4f}",
                "ms a step": round(1e3 * statistics.median(run.seconds), 1),
            }
        )
    note = (
        f"{options.batches} of {recipe.training.duration.removesuffix('ba')} batches of {recipe.training.global_batch} "
        f"on {machines} ranks, width {recipe.model.args['width']}; training loss: mean of the last {options.window} "
        "batches; losses in nats a token. The ranks lie on one machine: steps show what compression computes, and "
        "nothing of what it saves on a cable." + (f"\n{options.note}" if options.note else "")
    )
    if dist.get_global_rank() == 0:
        path = write_results("rank_curves", "openmoji", rows, note)
        draw({name: run.losses for name, run in curves.items()}, options.window, path.with_suffix(".png"))
    return rows


def draw(losses: dict[str, list[float]], window: int, path: Path) -> None:
    """A curve a run."""
    figure = chart()
    axes = figure.add_subplot()
    for name, values in losses.items():
        style = (
            {"color": "black", "linestyle": "--" if name == OTHER_SEED else "-"} if name in (PLAIN, OTHER_SEED) else {}
        )
        points = smoothed(values, window)
        axes.plot(range(window, len(values) + 1), points, linewidth=1.2, label=name, **style)
    axes.set(xlabel="batch", ylabel=f"training loss, nats a token (mean of {window} batches)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what trains here are processes on a CPU, and the table says so
    main()
