"""What each machine of benchmarks/network.py runs: every way of averaging, at every rate of the cable.

network.py starts it with the variables of a launcher and the file of its settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist
from torch import nn

from benchmarks import random_tokens
from benchmarks.namespaces import exchange, limiting, sent_bytes
from benchmarks.network_settings import Measured, Settings, Variant
from benchmarks.steady import let_go, run_steady, say
from recipes.algorithms.powersgd.block_gradients import layout
from recipes.algorithms.powersgd.low_rank import LowRank
from recipes.algorithms.powersgd.wire import bytes_sent
from recipes.algorithms.sixteen_bit.formats import FLOAT_32
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.trainer import build_trainer


class Steps(Callback):
    """Times steps after a warm-up and counts what the interface sent meanwhile; then it ends the run."""

    def __init__(self, warm_up: int, steps: int, measured: Measured, sent: Callable[[], int]) -> None:
        self.warm_up, self.steps, self.measured, self.sent = warm_up, steps, measured, sent
        self.began, self.before = (0.0, 0.0), 0

    def batch_end(self, state: State, logger: Logger) -> None:
        done = state.timestamp.batch.value - self.warm_up
        if done > 0:
            self.measured.seconds.append(time.perf_counter() - self.began[0])
            self.measured.computed.append(time.process_time() - self.began[1])
        if done == 0:
            dist.barrier()  # behind it, all that was to be sent before has left both machines
            self.before = self.sent()
        if done == self.steps:
            dist.barrier()
            self.measured.sent = (self.sent() - self.before) / self.steps
            state.stop_training()
        self.began = time.perf_counter(), time.process_time()


def recipe_of(settings: Settings, variant: Variant, folder: Path) -> Recipe:
    """yamls/openmoji_dalle.yaml at the settings' size, on tokens that mean nothing, with nothing beside training."""
    batches = settings.warm_up + settings.steps + 1
    recipe = load_config(
        ROOT / "yamls" / "openmoji_dalle.yaml",
        [
            *settings.model,
            f"output={folder}/run",
            f"data={{name: random_tokens, samples: {batches * settings.batch}}}",
            "evals={val: null}",
            f"training.global_batch={settings.batch}",
            f"training.duration={batches}ba",
            "training.eval_every=null",
            "training.device=cpu",
            "schedule.warmup=1ba",
            "checkpoints.save=false",
            "algorithms.scheduled_ema=null",
            *variant.changes,
        ],
        Recipe,
    )
    recipe.callbacks, recipe.loggers = {}, {}
    return recipe


def bytes_by_formula(task: nn.Module, rank: int | None, machines: int = 2) -> float:
    """Bytes of gradients that a machine sends a step, each sum as in a ring.

    Args:
        task: the model.
        rank: of the compression of its blocks' matrices; None: there is none.
        machines: among which is averaged.
    """
    if rank is None:
        return bytes_sent(sum(p.numel() for p in task.parameters()), machines, FLOAT_32)
    shapes, others = layout(task, shards=1)
    compressed = sum(LowRank(rank).bytes_sent(block, machines) for block in shapes)
    return compressed + bytes_sent(others, machines, FLOAT_32)


def measure(settings: Settings, folder: Path, log: Any) -> list[Measured]:
    """All runs of this machine, in turns: what else the processor does falls on all variants."""
    number = dist.get_global_rank()
    interface = settings.interfaces[number]

    def sent() -> int:
        return sent_bytes(interface) if settings.rates else 0

    found = []
    for rate in settings.rates or [0.0]:
        reached = 0.0
        if rate:
            subprocess.run(limiting(interface, rate), check=True)
            dist.barrier()
            reached = exchange(number, settings.addresses, int(125_000 * rate))  # for a second
        for turn in range(settings.rounds):
            for variant in settings.variants if turn % 2 == 0 else reversed(settings.variants):
                measured = Measured(variant.name, rate, turn, reached)
                callback = Steps(settings.warm_up, settings.steps, measured, sent)
                with contextlib.redirect_stdout(log):
                    run_steady(build_trainer(recipe_of(settings, variant, folder)), callback)
                let_go()
                found.append(measured)
                wall, own = (1e3 * statistics.median(s) for s in (measured.seconds, measured.computed))
                say(f"{rate:,.0f} Mbit/s, round {turn + 1}, {variant.name}: {wall:,.0f} ms a step, {own:,.0f} computed")
    return found


def main() -> None:
    settings = Settings.read(Path(sys.argv[1]))
    warnings.filterwarnings("ignore", message="Specifying `eval_interval")
    warnings.filterwarnings("ignore", message="The _fsdp_wrap attribute")  # Composer's, of its own
    dist.initialize_dist("cpu", timeout=120.0)
    random_tokens.register()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log.txt"), "w", encoding="utf-8") as log:
        found = measure(settings, Path(folder), log)
        task = build_on_meta(recipe_of(settings, settings.variants[0], Path(folder)).model)
        formula = {variant.name: bytes_by_formula(task, variant.rank) for variant in settings.variants}
        parameters = sum(p.numel() for p in task.parameters())
    dist.barrier()
    if dist.get_global_rank() == 0:
        out = Path(settings.out)
        partial = out.with_name(f".{out.name}.{os.getpid()}")
        values = {"runs": [asdict(run) for run in found], "formula": formula, "parameters": parameters}
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(out)


if __name__ == "__main__":
    main()
