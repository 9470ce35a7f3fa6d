"""Kernel launches and waits of the host in one training step of the shipped recipes, counted on a CPU.

    python benchmarks/launches.py
    python benchmarks/launches.py --recipes sd2_base --passes 2

The models have their real structure and a small width. Microbatches have the recipe's number format, and the levers of
the recipe act; the Triton kernels are counted and not run. `plain` is the recipe without levers that change modules.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.common.counting import Launches, counting
from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.gpu_run.numbers import batch_for
from recipes.algorithms.modules.fused_group_norm import fuse_group_norms
from recipes.algorithms.powersgd.low_rank import LowRank
from recipes.algorithms.resilience import guard
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.config.build import build
from recipes.config.recipe import Recipe, load_config
from recipes.engines.dry_run_checks import MetaRun
from recipes.engines.parts import Place, build_levers, the_one
from recipes.training.clock import Clock
from recipes.training.levers import Levers

SAMPLES = 2  # per microbatch
# The recipes of each kind of model, with overrides for a small width, and one microbatch.
NARROW = {
    "sd2_base": ["denoiser.channels=[32,32,64,64]", "denoiser.heads=[1,1,2,2]", "denoiser.text_width=16"],
    "dalle_1b": ["width=32", "heads=2", "codes=32", "text_vocabulary=64", "text_positions=16", "side=8"],
    "dvae": ["hidden=8", "initial=8", "codes=32"],
    "openmoji_text": [],
    "openmoji_vae": [],
    "openmoji_diffusion": ["denoiser.width=64", "denoiser.text_width=16"],
    "docs_gpt2": ["width=32", "vocabulary=64"],
    # The optimizer with 16-bit moments, one gradient scale per block and compression between machines.
    "dalle_2b": [
        "layers=4", "width=64", "heads=2", "codes=32", "text_vocabulary=64", "text_positions=16", "side=8",
    ],
}  # fmt: skip
# Changes besides those of the model, for which one process stands for a machine of one device.
SECTIONS = {"dalle_2b": ["training.fsdp=null", "algorithms.powersgd.overlap=false", "algorithms.powersgd.rank=16"]}
# Levers that change how a model computes; without them it is the plain one.
CHANGES = (
    "attention", "channels_last", "cudnn_benchmark", "fused_geglu", "fused_group_norm", "lean_blocks",
    "low_precision_norms", "working_weights",
)  # fmt: skip


def narrow_recipe(name: str, *overrides: str) -> Recipe:
    """A shipped recipe with a model of small width. Blocks are not compiled, which on a CPU takes minutes."""
    changes = [f"model.{change}" for change in NARROW[name]] + SECTIONS.get(name, [])
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [*changes, *overrides], Recipe, missing=[])
    recipe.algorithms = {label: one for label, one in recipe.algorithms.items() if one.name != "compile"}
    return recipe


class StepRun(MetaRun):
    """A run of one step on the CPU, as levers see it. Nothing is logged."""

    def __init__(
        self, module: nn.Module, task: nn.Module, precision: str, passes: int, optimizer: torch.optim.Optimizer
    ) -> None:
        # Not a multiple of the intervals at which levers log.
        super().__init__(task, precision, optimizer, Clock(1, SAMPLES, 0, "1000000ba", None))
        self.module, self.device = module, torch.device("cpu")
        self.passes, self.loss = passes, None

    def autocast(self) -> AbstractContextManager:
        """Autocast as on a GPU, with the CPU's lists of operations."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast("cpu", torch.bfloat16)


class Step(NamedTuple):
    """The parts of one step.

    Attributes:
        forward: of all microbatches.
        backward: of all microbatches.
        rest: levers and the optimizer.
    """

    forward: Launches
    backward: Launches
    rest: Launches

    @property
    def total(self) -> int:
        """All launches."""
        return sum(part.total for part in self)

    @property
    def copies(self) -> int:
        """See `Launches.copies`."""
        return sum(part.copies for part in self)

    @property
    def casts(self) -> int:
        """See `Launches.casts`."""
        return sum(part.casts for part in self)

    @property
    def waits(self) -> dict[str, int]:
        """Operation -> number of times that the host waits."""
        return dict(sum((part.waits for part in self[1:]), self.forward.waits.copy()))


def count_step(recipe: Recipe, passes: int) -> Step:
    """Count the second step of a recipe: the first one also makes what later steps find.

    Args:
        recipe: with a model that a CPU can train.
        passes: microbatches.
    """
    torch.manual_seed(0)
    task = build(recipe.model).train()
    precision = "amp_bf16" if recipe.training.precision in ("auto", "fastest") else recipe.training.precision
    names = {algorithm.name for algorithm in recipe.algorithms.values()}
    machines = two_machines() if "powersgd" in names else nullcontext(lambda module: module)
    with machines as wrapped, gradients_as_on_gpus():
        built = build_levers(recipe, Place(False, precision, 1), {"task": task}, SAMPLES * passes)
        scaling = the_one(built, ResblockGradScaling)
        every_run_has = guard.Guard(recipe.training.nonfinite_limit, recipe.output, scaling=scaling)
        levers = Levers(built, first=[every_run_has])
        optimizer = build(recipe.optimizer, parameters=[p for p in task.parameters() if p.requires_grad], task=task)
        levers_run = StepRun(task, task, precision, passes, optimizer)
        levers.prepare(levers_run)
        if "fused_group_norm" in names:
            fuse_group_norms(task, measured=False)  # the lever leaves it on a CPU
        levers.compile(levers_run)
        run = StepRun(wrapped(task), task, precision, passes, optimizer)
        levers.call("begin", run)
        batch = batch_for(task, SAMPLES, 32)
        _step(run, levers, batch, Launches(), Launches(), Launches())
        step = Step(Launches(), Launches(), Launches())
        _step(run, levers, batch, *step)
    return step


def gradients_as_on_gpus() -> AbstractContextManager:
    """A context in which the guard looks at gradients as on a GPU, where it does not look at each tensor by itself."""
    return patch.object(guard, "largest_magnitude", lambda tensors: nn.utils.get_total_norm(tensors, math.inf).float())


@contextmanager
def two_machines() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """A context in which this process believes to be one of two that average gradients, as on GPUs. It gives the
    function that wraps a model for that."""
    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    dist.init_process_group("fake", rank=0, world_size=2, store=store)
    send = dist.all_to_all_single

    def exchange(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        """A fake group sends nothing. What happened to lie in memory would decide which bases are computed again."""
        send(received, sent, group=group)
        with _disable_current_modes():  # the copy is not counted
            received.copy_(sent)

    try:
        with (
            patch.object(LowRank, "_by_cholesky", return_value=True),
            patch.object(dist, "all_to_all_single", exchange),
        ):
            yield DistributedDataParallel
    finally:
        dist.destroy_process_group()


def _step(
    run: StepRun, levers: Levers, batch: dict[str, Tensor], forward: Launches, backward: Launches, rest: Launches
) -> None:
    """One step, as the engines make it."""
    run.pass_number = -1
    with counting(rest, kernels=True):
        levers.call("before_passes", run)
        run.optimizer.zero_grad(set_to_none=True)
    for _ in range(run.passes):
        run.batch, run.pass_number = batch, run.pass_number + 1
        with counting(forward, kernels=True):
            levers.call("before_forward", run)
            with run.autocast():
                loss = run.module(batch)["total"] / run.passes
            levers.call("after_forward", run)
        with counting(backward, kernels=True):
            levers.call("before_backward", run)
            loss.backward()
            levers.call("after_backward", run)
    with counting(rest, kernels=True):
        levers.finish_gradients(run)
        run.optimizer.step()
        levers.call("step_end", run)


def row(name: str, step: Step) -> dict[str, Any]:
    """A row of the table."""
    return {
        "recipe": name,
        "forward": step.forward.total,
        "backward": step.backward.total,
        "rest": step.rest.total,
        "copies": step.copies,
        "casts": step.casts,
        "waits": sum(step.waits.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(NARROW), default=list(NARROW))
    parser.add_argument("--passes", type=positive, default=2, help="microbatches per step")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.recipes:
        recipe = narrow_recipe(name)
        plain = [f"algorithms.{label}=null" for label in recipe.algorithms if recipe.algorithms[label].name in CHANGES]
        if plain:
            rows.append(row(f"{name}, plain", count_step(narrow_recipe(name, *plain), arguments.passes)))
        rows.append(row(name, count_step(recipe, arguments.passes)))
    notes = (
        f"Operations that launch at least one kernel, in a step of {arguments.passes} microbatches at small width; the "
        "optimizer counts as one. `copies` go to other memory or another format, `casts` to another dtype; `waits` are "
        "values that the host reads."
    )
    write_results("launches", f"{arguments.passes}passes", rows, notes)


if __name__ == "__main__":
    main()
