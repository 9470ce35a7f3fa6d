"""Overhead of a recipe on several ranks: samples per second, compared with Composer alone on the same network.

    composer -n 2 benchmarks/overhead.py

The recipe is yamls/sd2_base.yaml at the size of benchmarks/levers.py, without its levers, and with the callbacks that
measure a run and latents from MDS shards. Composer alone has the same network, loss, optimizer and batch size, and
samples as tensors in memory. Both use DDP and take turns. Goal: not slower.
"""

import argparse
import contextlib
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist, reproducibility
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.common.latent_sets import write_set
from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.steady import Steady, free_memory, on_first_rank, run_until, shared_folder
from benchmarks.common.training import SIZES, recipe_with
from data.loading import Placement
from data.system.log import log
from recipes.config.build import build
from recipes.config.recipe import Recipe
from recipes.engines.composer.trainer import build_trainer

OURS, PLAIN = "recipe, latents from MDS shards", "Composer alone, samples in memory"
CALLBACKS = ("progress", "throughput", "lr_monitor")


class Plain(ComposerModel):
    """The task, and what `data.latents` does on the device: sampling from the posterior."""

    def __init__(self, task: nn.Module) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mean, std, text = (batch[name].float() for name in ("mean", "std", "text"))
        return self.task({"latents": mean + std * torch.randn_like(mean), "text": text})["total"]

    def loss(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"total": outputs}


def plain_trainer(recipe: Recipe, samples: list[dict[str, Tensor]], batches: int) -> Trainer:
    """Composer's Trainer with the model and the optimizer of a recipe, and nothing else of it."""
    reproducibility.seed_all(recipe.seed)
    task = build(recipe.model)
    repeated = samples * (1 + batches * recipe.training.global_batch // len(samples))
    return Trainer(
        model=Plain(task),
        train_dataloader=DataLoader(
            repeated,
            batch_size=recipe.training.device_batch(dist.get_world_size()),
            sampler=dist.get_sampler(repeated, shuffle=True, drop_last=True),
            drop_last=True,
        ),
        optimizers=build(recipe.optimizer, parameters=list(task.parameters())),
        max_duration=recipe.training.duration,
        eval_interval=0,
        progress_bar=False,
        device="gpu" if torch.cuda.is_available() else "cpu",
        precision="amp_bf16" if torch.cuda.is_available() else "fp32",
        seed=recipe.seed,
    )


def in_memory(recipe: Recipe) -> list[dict[str, Tensor]]:
    """Every sample of the recipe's data, on every rank."""
    placement = Placement(batch=1, training=False, copies=dist.get_world_size())
    loader = build(recipe.data, placement=placement, requirements={}).loader
    return [{name: tensor[0].clone() for name, tensor in batch.items()} for batch in loader]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="sd2" if gpu else "small")
    parser.add_argument("--batch", type=positive, help="samples per step, over all ranks")
    parser.add_argument("--rounds", type=positive, default=4, help="runs of each alternative")
    parser.add_argument("--windows", type=positive, default=4, help="windows per run")
    parser.add_argument("--steps", type=positive, default=20 if gpu else 2, help="steps per window")
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    batch, resolution = options.batch or size.batch, size.resolutions[0]
    steady = (3, options.windows, options.steps)
    batches = 4 + options.windows * options.steps
    dist.initialize_dist("gpu" if gpu else "cpu")
    found: dict[str, list[Steady]] = {OURS: [], PLAIN: []}
    with shared_folder() as (folder, output):
        with contextlib.redirect_stdout(output):
            on_first_rank(lambda: write_set(folder / "set", size.encoders, [resolution], 2 * batch, gpu))
        changes = [f"data.streams.train.repeat={1 + batches // 2}", "data.caption_dropout=0.0"]
        recipe = recipe_with(changes, size, folder / "set", resolution, batch, None, CALLBACKS)
        recipe.algorithms = {}  # which Composer alone does not have
        with contextlib.redirect_stdout(output):
            samples = in_memory(recipe_with([], size, folder / "set", resolution, batch, None))
        makers = {OURS: lambda: build_trainer(recipe), PLAIN: lambda: plain_trainer(recipe, samples, batches)}
        for number in range(options.rounds):
            for name in list(makers) if number % 2 == 0 else reversed(makers):
                with contextlib.redirect_stdout(output):
                    found[name].append(run_until(makers[name](), Steady(*steady)))
                free_memory()
                rate = statistics.median(found[name][-1].by_clock)
                log.info(f"round {number + 1} of {options.rounds}, {name}: {rate:,.2f} samples/s")
    return write_report(found, batch, resolution, options)


def write_report(found: dict[str, list[Steady]], batch: int, resolution: int, options: Any) -> list[dict[str, Any]]:
    """The rows of the table, which the first rank writes."""
    rows = []
    for name, runs in found.items():
        row: dict[str, Any] = {"training": name}
        for label, rates in (("samples/s", "by_clock"), ("samples/s computed", "rates")):
            medians = [statistics.median(getattr(run, rates)) for run in runs]
            others = [statistics.median(getattr(run, rates)) for run in found[PLAIN]]
            row[label] = round(statistics.median(medians), 2)
            row["relative to Composer" + label.removeprefix("samples/s")] = round(
                statistics.median(a / b for a, b in zip(medians, others, strict=True)), 3
            )
        rows.append(row)
    notes = (
        f"{resolution} x {resolution} pixels, {batch} samples per step on {dist.get_world_size()} ranks, medians of "
        f"{options.rounds} rounds; runs of the same round are compared. Computed: by the CPU time of the first rank's "
        "process, which excludes waits and is less affected by other load on the machine.\n"
        f"Goal: not slower than Composer alone: {rows[0]['relative to Composer']:.3f} by wall time, "
        f"{rows[0]['relative to Composer computed']:.3f} by CPU time."
    )
    if dist.get_global_rank() == 0:
        write_results("overhead", f"{options.size}-{dist.get_world_size()}ranks", rows, notes)
    return rows


if __name__ == "__main__":
    main()
