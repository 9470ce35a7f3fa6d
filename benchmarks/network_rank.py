"""The process that benchmarks/network.py runs on each machine: every way of averaging at every rate of the cable.

network.py starts it with the environment variables of a launcher and the file of its settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import contextlib
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from composer import Callback as ComposerCallback
from composer import Logger, State
from composer.utils import dist
from torch import nn

from benchmarks.common.namespaces import exchange, limiting, sent_bytes
from benchmarks.common.network_settings import MeasuredRun, Settings, Variant
from benchmarks.common.steady import free_memory, run_until
from benchmarks.gpu_run.subjects import register_data
from data.system.files import write_json
from data.system.log import log
from recipes.algorithms.powersgd.all_reduce import bytes_sent
from recipes.algorithms.powersgd.block_gradients import first_device_shapes
from recipes.algorithms.powersgd.low_rank import LowRank
from recipes.algorithms.sixteen_bit.formats import FLOAT_32
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.trainer import build_trainer


class Steps(ComposerCallback):
    """Times steps after a warm-up and counts the bytes that the interface sends during them; then ends the run."""

    def __init__(self, warm_up: int, steps: int, measured: MeasuredRun, sent: Callable[[], int]) -> None:
        self.warm_up, self.steps, self.measured, self.sent = warm_up, steps, measured, sent
        self.began, self.before = (0.0, 0.0), 0

    def batch_end(self, state: State, logger: Logger) -> None:
        done = state.timestamp.batch.value - self.warm_up
        if done > 0:
            self.measured.seconds.append(time.perf_counter() - self.began[0])
            self.measured.computed.append(time.process_time() - self.began[1])
        if done == 0:
            dist.barrier()  # everything sent before it has left both machines
            self.before = self.sent()
        if done == self.steps:
            dist.barrier()
            self.measured.sent = (self.sent() - self.before) / self.steps
            state.stop_training()
        self.began = time.perf_counter(), time.process_time()


def recipe_of(settings: Settings, variant: Variant, folder: Path) -> Recipe:
    """yamls/openmoji_dalle.yaml at the size of the settings, on random tokens, without validation and callbacks."""
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
            "optimizer={name: adamw, lr: 1.5e-3, betas: [0.9, 0.96], weight_decay: 4.5e-2}",  # muon sends tensors
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
    """Bytes of gradients that a machine sends per step, if every sum is a ring all-reduce.

    Args:
        task: the model.
        rank: rank of the compression of its blocks' matrices; None: no compression.
        machines: number of machines whose gradients are averaged.
    """
    if rank is None:
        return bytes_sent(sum(p.numel() for p in task.parameters()), machines, FLOAT_32)
    shapes, others = first_device_shapes(task, shards=1)
    compressed = sum(LowRank(rank).bytes_sent(block, machines) for block in shapes)
    return compressed + bytes_sent(others, machines, FLOAT_32)


def measure(settings: Settings, folder: Path, output: Any) -> list[MeasuredRun]:
    """All runs of this machine. Variants take turns, so that other load on the processor affects all of them."""
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
            reached = exchange(number, settings.addresses, int(125_000 * rate))  # takes a second
        for turn in range(settings.rounds):
            for variant in settings.variants if turn % 2 == 0 else reversed(settings.variants):
                measured = MeasuredRun(variant.name, rate, turn, reached)
                callback = Steps(settings.warm_up, settings.steps, measured, sent)
                with contextlib.redirect_stdout(output):
                    run_until(build_trainer(recipe_of(settings, variant, folder)), callback)
                free_memory()
                found.append(measured)
                wall, own = (1e3 * statistics.median(s) for s in (measured.seconds, measured.computed))
                times = f"{wall:,.0f} ms per step, {own:,.0f} ms computed"
                log.info(f"{rate:,.0f} Mbit/s, round {turn + 1}, {variant.name}: {times}")
    return found


def main() -> None:
    settings = Settings.read(Path(sys.argv[1]))
    warnings.filterwarnings("ignore", message="Specifying `eval_interval")
    dist.initialize_dist("cpu", timeout=120.0)
    register_data()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log.txt"), "w", encoding="utf-8") as output:
        found = measure(settings, Path(folder), output)
        task = build_on_meta(recipe_of(settings, settings.variants[0], Path(folder)).model)
        formula = {variant.name: bytes_by_formula(task, variant.rank) for variant in settings.variants}
        parameters = sum(p.numel() for p in task.parameters())
    dist.barrier()
    if dist.get_global_rank() == 0:
        values = {"runs": [asdict(run) for run in found], "formula": formula, "parameters": parameters}
        write_json(Path(settings.out), values)


if __name__ == "__main__":
    main()
