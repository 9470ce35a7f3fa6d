"""What the host does for a GPU, measured without one: how fast it launches the steps of training at their real sizes.

    python benchmarks/host.py
    python benchmarks/host.py --settings "sd2_base, microbatches of 128"
    python benchmarks/host.py --averaging

The recipes train on a GPU that computes nothing (see `benchmarks.stub_gpu.build`), so a step lasts as long as the host
needs to launch it: the rate is the most that any GPU could reach with this host. Memory is that of PyTorch's allocator,
which works as on an H100 with 80 GB, and is compared with the planner's. Workspaces of cuDNN and of cuBLASLt, which
only a GPU chooses, are not in it.

Rows take turns, each time in a new process, because the rates of two processes of one row have differed by up to 15%.
The rows with averaging of gradients are in one table with those without, so that they can be compared (`--averaging`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import torch

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.steady import watch
from benchmarks.gpu_run.page import GOALS
from benchmarks.gpu_run.subjects import NO_AVERAGE, SUBJECTS, recipe_for
from benchmarks.gpu_run.trained import made_on
from benchmarks.stub_gpu.build import build, variables, why_not
from benchmarks.stub_gpu.use import Counts, compute_decisions_on_host
from recipes.algorithms.gradients import block_all_reduce
from recipes.config.recipe import Recipe
from recipes.engines.composer.trainer import build_trainer
from recipes.engines.data_parallel import data_parallel
from recipes.engines.lightning import trainer as lightning
from recipes.engines.lightning.run import LightningRun
from recipes.planning.costs import costs_of, plan_of
from recipes.planning.devices import Devices
from recipes.planning.divided_run import Cluster, DividedRun
from recipes.planning.hardware.gpus import device_named
from recipes.planning.hardware.peak_flops import peak_flops
from recipes.planning.plan import Planner
from recipes.training.callback import Callback
from recipes.training.run import Run

# Which norms are fused is chosen by timing them, and kernels take no time here.
ON_ONE = ["training.fsdp=null", "algorithms.fused_group_norm.when=always"]
AT_512 = [*ON_ONE, NO_AVERAGE]
# Over one device, which holds all that several would divide. The stub sends nothing anyhow.
SHARDED = [*ON_ONE, "training.fsdp={strategy: SHARD_GRAD_OP, sync: batch}"]
FULL_SHARD = "training.fsdp={strategy: FULL_SHARD}"
RECOMPUTED = "algorithms.activation_checkpointing={name: activation_checkpointing}"
COMPILED = ["training.microbatch=16", "algorithms.compile={name: compile, mode: reduce-overhead}"]
GRAPHS = ["training.microbatch=16", "algorithms.graphs={name: cuda_graphs}"]
LIGHTNING = "training.engine=lightning"
BY_BLOCK = "algorithms.averages={name: block_all_reduce}"
OF_MANY = "unet_256_of_128"
WARM_UP, WINDOWS, STEPS = 5, 3, 3  # steps before the first window, windows, steps of a window
MARK = "row: "
# Row -> subject of gpu.py, and changes of its recipe.
SETTINGS = {
    "sd2_base, microbatches of 64": ("unet_256", [*ON_ONE, "training.microbatch=64"]),
    "sd2_base, microbatches of 128": ("unet_256", [*ON_ONE, "training.microbatch=128"]),
    "sd2_base, microbatches of 256": ("unet_256", [*ON_ONE, "training.microbatch=256"]),
    "sd2_base, microbatches of 64, SHARD_GRAD_OP": ("unet_256", [*SHARDED, "training.microbatch=64"]),
    "sd2_base, 16 images": (OF_MANY, [*ON_ONE, "training.microbatch=16"]),
    "sd2_base, 16 images, Lightning": (OF_MANY, [*ON_ONE, "training.microbatch=16", LIGHTNING]),
    "sd2_base, 16 images, CUDA graphs of torch.compile, Lightning": (OF_MANY, [*ON_ONE, *COMPILED, LIGHTNING]),
    "sd2_base, 16 images, CUDA graphs": (OF_MANY, [*ON_ONE, *GRAPHS]),
    "sd2_base, 16 images, CUDA graphs, Lightning": (OF_MANY, [*ON_ONE, *GRAPHS, LIGHTNING]),
    "sd2_base_512, microbatches of 32": ("unet_512", [*AT_512, "training.microbatch=32"]),
    "sd2_base_512, microbatches of 64": ("unet_512", [*AT_512, "training.microbatch=64"]),
    "dalle_1b, microbatches of 16": ("transformer", [NO_AVERAGE]),
    "dalle_1b, microbatches of 16, recomputing": ("transformer", [NO_AVERAGE, RECOMPUTED]),
    "dalle_1b, microbatches of 16, recomputing, FULL_SHARD": ("transformer", [NO_AVERAGE, RECOMPUTED, FULL_SHARD]),
}
# With the averaging of gradients over several copies of the model.
AVERAGING = {
    "DDP": (OF_MANY, [*ON_ONE, "training.microbatch=16"]),
    "by block": (OF_MANY, [*ON_ONE, "training.microbatch=16", BY_BLOCK]),
    "DDP, Lightning": (OF_MANY, [*ON_ONE, "training.microbatch=16", LIGHTNING]),
    "CUDA graphs of torch.compile, DDP, Lightning": (OF_MANY, [*ON_ONE, *COMPILED, LIGHTNING]),
    "CUDA graphs, by block": (OF_MANY, [*ON_ONE, *GRAPHS, BY_BLOCK]),
    "CUDA graphs, by block, Lightning": (OF_MANY, [*ON_ONE, *GRAPHS, BY_BLOCK, LIGHTNING]),
}


class Steps(Callback):
    """Times windows of steps, under either engine.

    Attributes:
        rates: steps/s of each window. Samples are not counted: Lightning's engine adds them up on the device.
        wraps: whether DistributedDataParallel averages gradients.
        launches: kernels launched in the last step.
        waits: how often the host waited in the last step for what it had launched.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.wraps = False
        self.rates: list[float] = []
        self.launches = self.waits = 0
        self._before = (0, 0)
        self._began = 0.0

    def begin(self, run: Run) -> None:
        if self.wraps and isinstance(run, LightningRun):
            run.ddp = data_parallel(run.task, averaged=False)

    def step_end(self, run: Run) -> None:
        now = self.counts.launches, self.counts.waits
        self.launches, self.waits = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        done = run.clock.batch - WARM_UP
        if done < 0 or done % STEPS:
            return
        began, self._began = self._began, time.perf_counter()
        if done:
            self.rates.append(STEPS / (self._began - began))
        else:
            torch.cuda.reset_peak_memory_stats()


def train(recipe: Recipe, steps: Steps, of_many: bool) -> None:
    """Train under the recipe's engine.

    Args:
        recipe: of one device.
        steps: measures.
        of_many: average gradients as with many devices, in a group of this one. The stub sends nothing anyhow.
    """
    by_block = of_many and any(lever.name == "block_all_reduce" for lever in recipe.algorithms.values())
    block_all_reduce.world_size = lambda: 128 if by_block else 1
    steps.wraps = of_many and not by_block
    if recipe.training.engine == "lightning":
        trainer = lightning.build_trainer(recipe, lambda parts: parts.callbacks.update(steps=steps))
    else:
        trainer = build_trainer(recipe)
        watch(trainer, steps)
        if steps.wraps:
            trainer.state.model = data_parallel(trainer.state.model, averaged=False)
    trainer.fit()


def planned(recipe: Recipe, of_many: bool) -> float:
    """Bytes on one H100, alone or as one of 128, by the planner."""
    device = device_named("h100", ROOT / "runs" / "devices")
    world = 128 if of_many else 1
    devices, planner = Devices(world, world), Planner(recipe)
    run = DividedRun(
        division="as the recipe says",
        recipe=recipe,
        task=planner.task,
        traces=planner.divided(1),
        passes=planner.passes(1),
        costs=costs_of(recipe, plan_of(recipe, planner.task, devices)),
        devices=devices,
        cluster=Cluster(device, peak_flops(device.name, "bf16"), device.shares, world, min(world, 8)),
        samples=planner.batches[0],
        batch=recipe.training.global_batch,
    )
    recompute = any(lever.name == "activation_checkpointing" for lever in recipe.algorithms.values())
    return run.memory(recipe.training.microbatch, recompute).total


def measure(name: str) -> dict[str, Any]:
    """What is measured of a row of the table in one process."""
    key, changes = (SETTINGS | AVERAGING)[name]
    subject = SUBJECTS[key]
    length = f"training.duration={WARM_UP + WINDOWS * STEPS}ba"
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_for(subject, [*changes, length], False, Path(folder))
        with made_on(torch.device("cuda")):
            train(recipe, steps, of_many=name in AVERAGING)
        peak = torch.cuda.max_memory_allocated()
    rate = statistics.median(steps.rates) * recipe.training.global_batch * subject.per_sample
    return {
        "recipe": name,
        "rate": rate,
        "launches per step": steps.launches,
        "waits per step": steps.waits,
        "peak GB": round(peak / 1e9, 1),
        "reserved GB": round(torch.cuda.max_memory_reserved() / 1e9, 1),
        "peak GB by the planner": round(planned(recipe, name in AVERAGING) / 1e9, 1),
    }


def row(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table: the median rate, and all else of the last process.

    Args:
        measured: what `measure` returned in each process.
    """
    rates, last = [found["rate"] for found in measured], measured[-1]
    subject = SUBJECTS[(SETTINGS | AVERAGING)[last["recipe"]][0]]
    goal = next(goal for _, table, _, goal in GOALS if subject.table.startswith(table))
    rate = statistics.median(rates)
    values = {
        "recipe": last["recipe"],
        "host's rate": f"{rate:,.0f} {subject.unit}",
        "lowest to highest": f"{min(rates):,.0f} to {max(rates):,.0f}",
        "goal on an H200": f"{goal:,}",
        "host / goal": round(rate / goal, 1),
    }
    return values | {key: value for key, value in last.items() if key != "rate"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--averaging", action="store_true", help="measure the averaging of gradients instead")
    parser.add_argument("--rounds", type=positive, default=3, help="processes of each row (default: %(default)s)")
    parser.add_argument("--row", choices=list(SETTINGS | AVERAGING), help=argparse.SUPPRESS)  # on the stub GPU
    arguments = parser.parse_args()
    if arguments.row:
        compute_decisions_on_host()
        print(MARK + json.dumps(measure(arguments.row)))
        return
    if reason := why_not():
        sys.exit(f"host.py: {reason}")
    names = arguments.settings
    if arguments.averaging:
        names = [*(name for name, (subject, _) in SETTINGS.items() if subject == OF_MANY), *AVERAGING]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | variables(build(Path(folder)))
        # Each in a process of its own, with all memory of the GPU.
        for name in names * arguments.rounds:
            command = [sys.executable, __file__, "--row", name]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.exit(f"host.py: {name} ended with status {done.returncode}")
            found[name].append(json.loads(done.stdout.split(MARK)[1]))
    notes = (
        "Measured on a GPU that computes nothing. Its kernels take no time, so a step lasts as long as one core of "
        "this host needs to launch it. A step has 256 images at 256 (or 16, the share of one of 128 GPUs in the "
        "recipe's batch of 2,048), 64 at 512, and 64 sequences of 1,280 tokens. `waits` are those for what was "
        "launched before; a copy from memory that is not page-locked counts as one. One of them is due to this "
        "measurement, which decides on the host whether gradients are finite. `peak GB` is what PyTorch's allocator "
        "gave out at once, and `reserved GB` what it had of the GPU, with the memory that CUDA graphs keep; workspaces "
        "of cuDNN come on top. Rates are medians of "
        f"{arguments.rounds} processes, rows taking turns."
    )
    if arguments.averaging:
        notes = f"sd2_base with 16 images; the first rows have no averaging, `by block` has block_all_reduce. {notes}"
    rows = [row(measured) for measured in found.values()]
    write_results("host_averaging" if arguments.averaging else "host", "sd2", rows, notes)


if __name__ == "__main__":
    main()
