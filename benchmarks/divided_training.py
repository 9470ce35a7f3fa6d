"""Training in each way to divide it over devices: losses and weights compared with one device, and rates.

    torchrun --nproc_per_node 8 benchmarks/divided_training.py
    torchrun --nproc_per_node 8 benchmarks/divided_training.py --parts numbers --only FULL_SHARD tensor_parallel
    torchrun --nproc_per_node 2 benchmarks/divided_training.py --models transformer   # on CPUs at tiny sizes
    python benchmarks/divided_training.py --parts numbers                             # engines and levers on one device

Numbers: small networks of the kinds of yamls/sd2_base.yaml and yamls/dalle_1b.yaml, without levers of their own, train
for some steps in each way, in 32 bits without TF32 and under bf16 autocast. A plain loop of PyTorch on one device
trains the same samples with the same noise. AdamW has a large `eps`, so that an update is proportional to the gradient:
otherwise a gradient that is scaled wrongly would not be noticed. The script fails if a difference exceeds its
tolerance, or if the weights of two ranks differ.

Rates: the same recipes on random data, with the sizes, the levers and the samples per GPU of the starting points in
benchmarks/gpu.py. On CPUs, tiny sizes, by the CPU time of the first rank, which excludes waiting for others.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import torch
from composer.utils import dist, reproducibility
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.common.options import positive
from benchmarks.common.reporting import keep_results, reason, write_results
from benchmarks.common.steady import free_memory, shared_folder
from benchmarks.gpu_run.context import Context
from benchmarks.gpu_run.subjects import LIGHTNING, SMALL_DECODER, SMALL_UNET, SUBJECTS, register_data
from benchmarks.gpu_run.trained import measure
from data.cost import count_text
from data.loading import Placement
from data.system.log import log
from data.system.process_groups import leave
from recipes.algorithms.averaging.average import reshard
from recipes.algorithms.sharding.shards import whole
from recipes.config.build import build
from recipes.config.components import COMPONENTS
from recipes.config.recipe import Recipe, load_config
from recipes.training.callback import Callback
from recipes.training.ranks import all_gather, is_first_rank, world_size
from recipes.training.run import Run

PER_RANK = 4  # samples of a step, in the comparison of numbers
CLIP = 1.0  # below the norm of some steps' gradients and above that of others
LEARNING_RATE = 1.0
# Relative to the losses, and to the change of all weights by the whole run. In 32 bits only the order of sums differs.
# bf16 rounds each factor by up to 2^-9, and another order of sums or other sizes of batches round other values.
TOLERANCES = {"fp32": (1e-4, 1e-3), "amp_bf16": (1e-2, 0.1)}
PASSED = "passed"
TWO_PASSES = f"training.microbatch={PER_RANK // 2}"
BY_BLOCK = "algorithms.averages={name: block_all_reduce}"
# Of more columns than any matrix has, so that nothing is lost.
FULL_RANK = f"algorithms.low_rank={{name: powersgd, rank: 4096, clip: {CLIP}, wire: 32-bit, buffer: 32-bit}}"


@dataclass(frozen=True)
class Way:
    """A way to divide training over devices.

    Attributes:
        name: in the tables.
        changes: `key=value` overrides of the recipe.
        multiple: of which the number of devices must be.
        gpu: whether it is for GPUs only.
        transformer: whether it is for transformers only.
        rate: whether its rate is measured, too.
    """

    name: str
    changes: tuple[str, ...]
    multiple: int = 1
    gpu: bool = False
    transformer: bool = False
    rate: bool = True


def ways(world: int) -> list[Way]:
    """All ways to use a number of devices, the plain one first."""
    whole = "DDP" if world > 1 else "one device"
    by_block, averages = (", block_all_reduce", (BY_BLOCK,)) if world > 1 else ("", ())
    loses_averages = torch.__version__ < (2, 8)  # between replicas on a CPU, so that a run is refused
    tensor = ("training.tensor_parallel=2", *(["training.fsdp={}"] if world > 2 else []))
    found = [
        Way(whole, ()),
        Way(f"{whole}, Lightning", LIGHTNING),
        Way(f"{whole}, two microbatches", (TWO_PASSES,), rate=False),
        Way(f"compiled, {whole}", ("algorithms.compile={name: compile}",), gpu=True),
        Way(f"CUDA graphs{by_block}", (*averages, "algorithms.graphs={name: cuda_graphs}"), gpu=True),
        Way("SHARD_GRAD_OP", (_fsdp("SHARD_GRAD_OP"),)),
        Way(
            "SHARD_GRAD_OP, Lightning, two microbatches, reduced once",
            (_fsdp("SHARD_GRAD_OP, sync: batch"), *LIGHTNING, TWO_PASSES),
            rate=False,
        ),
        Way("FULL_SHARD", (_fsdp("FULL_SHARD"),)),
        Way("FULL_SHARD, Lightning", (_fsdp("FULL_SHARD"), *LIGHTNING)),
        Way("FULL_SHARD, two replicas", (_fsdp("FULL_SHARD, replicas: 2"),), multiple=4, gpu=loses_averages),
    ]
    if world > 1:
        found += [
            Way("block_all_reduce", averages),
            Way("block_all_reduce, Lightning, two microbatches", (*averages, *LIGHTNING, TWO_PASSES), rate=False),
        ]
    return [
        *found,
        Way(
            "two replicas, powersgd of full rank",
            ("training.fsdp={replicas: 2}", "training.grad_clip=null", FULL_RANK),
            multiple=2,
            rate=False,
        ),
        Way("tensor_parallel 2", tensor, multiple=2, transformer=True),
        Way(
            "tensor_parallel 2, sequence_parallel, Lightning",
            (*tensor, "training.sequence_parallel=true", *LIGHTNING),
            multiple=2,
            transformer=True,
        ),
    ]


def _fsdp(strategy: str) -> str:
    return f"training.fsdp={{strategy: {strategy}}}"


# --- numbers ---------------------------------------------------------------------------------------------------------

MODELS = {
    "unet": ("sd2_base.yaml", (*SMALL_UNET, "data={name: numbered_latents, samples: %d, resolution: 64}")),
    "transformer": (
        "dalle_1b.yaml",
        (*SMALL_DECODER, "data={name: random_tokens, samples: %d, padded: true}", "model.attention=masked"),
    ),
}


def small_recipe(model: str, changes: Iterable[str], precision: str, steps: int, folder: Path) -> Recipe:
    """A small network whose only algorithms are those of the changes."""
    yaml, sizes = MODELS[model]
    batch = PER_RANK * world_size()
    keys = [size % (steps * batch) if "%d" in size else size for size in sizes]
    keys += ["evals.val=null", f"output={folder}/run", f"training={{global_batch: {batch}, duration: {steps}ba}}"]
    keys += [f"training={{microbatch: null, fsdp: null, grad_clip: {CLIP}, eval_every: null}}"]
    keys += [f"optimizer={{name: adamw, lr: {LEARNING_RATE}, betas: [0.9, 0.95], eps: 1.0, weight_decay: 0.01}}"]
    keys += ["schedule={name: constant, warmup: 0ba}", f"training.precision={precision}"]
    keys += ["checkpoints={save: false, every: null, autoresume: false, load_weights: null}"]
    recipe = load_config(ROOT / "yamls" / yaml, [*keys, *changes], Recipe, [])
    own = {change.split("=")[0].removeprefix("algorithms.") for change in changes}
    recipe.algorithms = {label: lever for label, lever in recipe.algorithms.items() if label in own}
    recipe.callbacks, recipe.loggers = {}, {}
    return recipe


def exact_products() -> None:
    """Products of 32-bit matrices without TF32, in which engines compute."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


class Watch(Callback):
    """Keeps the losses, and the weights at the end, on the host."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def begin(self, run: Run) -> None:
        exact_products()

    def step_end(self, run: Run) -> None:
        self.losses.append(run.loss)

    def end(self, run: Run) -> None:
        reshard(run.task)
        for name, parameter in run.task.named_parameters():
            own = parameter.detach()
            self.weights[name] = (whole(own) if isinstance(own, DTensor) else own).cpu().clone()


def trained(recipe: Recipe) -> Watch:
    """Train a recipe as recipes/train.py does."""
    watch = Watch()
    build_trainer = importlib.import_module(f"recipes.engines.{recipe.training.engine}.trainer").build_trainer
    trainer = build_trainer(recipe, lambda parts: parts.callbacks.update(watch=watch))
    trainer.fit()
    trainer.close()
    return watch


@dataclass(frozen=True)
class Alone:
    """What one device makes of a recipe: the weights before, the losses, and the weights afterwards."""

    first: dict[str, Tensor]
    losses: list[float]
    weights: dict[str, Tensor]


def alone(recipe: Recipe, device: torch.device) -> Alone:
    """Train on one device, by PyTorch alone."""
    exact_products()
    reproducibility.seed_all(recipe.seed)
    task = build(recipe.model).to(device)
    first = {name: p.detach().cpu().clone() for name, p in task.named_parameters()}
    placement = Placement(batch=recipe.training.global_batch, training=True, seed=recipe.seed)
    loader = build(recipe.data, placement=placement, requirements=task.requirements()).loader
    values = recipe.optimizer.args
    optimizer = torch.optim.AdamW(
        task.parameters(), values["lr"], tuple(values["betas"]), values["eps"], values["weight_decay"]
    )
    losses = []
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.training.precision == "amp_bf16"):
            loss = task(batch)["total"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Alone(first, losses, {name: p.detach().cpu() for name, p in task.named_parameters()})


def compared(found: Watch, expected: Alone, precision: str, device: torch.device) -> dict[str, Any]:
    """The cells of a row. Every rank must call it."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in found.weights.values():
        digest.update(tensor.numpy().tobytes())
    own = torch.tensor(list(digest.digest()), device=device)
    alike = all(torch.equal(own, other) for other in all_gather(own))
    losses, wanted = (torch.tensor(values, dtype=torch.float64) for values in (found.losses, expected.losses))
    loss = float(((losses - wanted) / wanted).abs().max())

    def norm(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
        return torch.cat([(one[name] - other[name]).double().flatten() for name in expected.first]).norm()

    weights = float(norm(found.weights, expected.weights) / norm(expected.weights, expected.first))
    most = TOLERANCES[precision]
    passed = alike and loss <= most[0] and weights <= most[1]  # false for NaN
    return {
        "losses' relative difference": f"{loss:.1e}",
        "weights' relative difference": f"{weights:.1e}",
        "tolerances": f"{most[0]:g}, {most[1]:g}",
        "ranks": "alike" if alike else "DIFFER",
        "result": PASSED if passed else "FAILED",
    }


def numbers(options: argparse.Namespace, device: torch.device, folder: Path, output: Any) -> list[dict[str, Any]]:
    """Write the table of numbers, and return its rows."""
    rows: list[dict[str, Any]] = []
    size = f"{world_size()}rank{'s' * (world_size() > 1)}"
    for model in options.models:
        for precision in options.precisions:
            expected = alone(small_recipe(model, (), precision, options.steps, folder), device)
            for way in chosen(options, model, device):
                row = {"model": model, "precision": precision, "way": way.name}
                try:
                    with contextlib.redirect_stdout(output):
                        found = trained(small_recipe(model, way.changes, precision, options.steps, folder))
                    row |= compared(found, expected, precision, device)
                except Exception as error:  # of all ranks; otherwise the others wait until they time out
                    row["result"] = f"FAILED: {reason(error)}"
                rows.append(row)
                log.info(" ".join(map(str, row.values())))
                keep_results("divided_numbers", size, rows)
                free_memory()
    if is_first_rank():
        notes = (
            f"{count_text(world_size(), 'rank')}, {options.steps} steps. Losses: the largest difference of a step's. "
            "Weights: the norm of the difference at the end, relative to the norm of their change in the run. "
            "Tolerances: of both. Ranks: whether all have the same bits in the end."
        )
        write_results("divided_numbers", size, rows, notes)
    return rows


# --- rates -----------------------------------------------------------------------------------------------------------

RATED = {"unet": "unet_256", "transformer": "transformer"}


def rates(options: argparse.Namespace, device: torch.device, folder: Path, output: Any) -> list[dict[str, Any]]:
    """Write the table of rates, and return its rows."""
    rows = []
    for model in options.models:
        subject = SUBJECTS[RATED[model]]
        first = None
        for way in chosen(options, model, device):
            if not way.rate:
                continue
            batch = world_size() * (PER_RANK if options.small else subject.batch)
            changes = [*subject.start, *way.changes, f"training.global_batch={batch}"]
            row: dict[str, Any] = {"model": model, "way": way.name}
            try:
                with contextlib.redirect_stdout(output):
                    found, _, _ = measure(subject, changes, Context(folder, options.small), None)
                rate = found[subject.unit]
                first = first or rate
                row |= {"rate": rate, "unit": subject.unit, "per GPU": round(rate / world_size(), 1)}
                row |= {"range": found["range"], "relative to the first": round(rate / first, 3)}
                row |= {name: found[name] for name in ("peak GB", "loss") if name in found}
            except Exception as error:  # such as a lack of memory
                row["rate"] = reason(error)
            rows.append(row)
            log.info(" ".join(map(str, row.values())))
            free_memory()
    if is_first_rank():
        write_results("divided_rates", f"{'small' if options.small else 'shipped'}-{world_size()}ranks", rows)
    return rows


def chosen(options: argparse.Namespace, model: str, device: torch.device) -> list[Way]:
    """The ways that the command line names, as far as they are possible here."""
    gpu, transformer = device.type == "cuda", model == "transformer"
    return [
        way
        for way in ways(world_size())
        if world_size() % way.multiple == 0
        and (gpu or not way.gpu)
        and (transformer or not way.transformer)
        and (not options.only or way.name.startswith(tuple(options.only)))
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["numbers", "rates"], default=["numbers", "rates"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=list(TOLERANCES), default=list(TOLERANCES))
    parser.add_argument("--only", nargs="+", default=[], metavar="WAY", help="only ways whose names begin so")
    parser.add_argument("--steps", type=positive, default=6, help="steps of the comparison of numbers")
    parser.add_argument("--small", action="store_true", default=not gpu, help="rates of tiny sizes (default on a CPU)")
    options = parser.parse_args(arguments)
    dist.initialize_dist("gpu" if gpu else "cpu", timeout=600.0)
    if not any(chosen(options, model, device_of(gpu)) for model in options.models):
        parser.error(f"--only: no way for {count_text(world_size(), 'device')} begins with {' or '.join(options.only)}")
    register_data()
    COMPONENTS["data"]["numbered_latents"] = "benchmarks.common.numbered_latents:numbered_latents"
    rows, first = [], is_first_rank()
    with shared_folder() as (folder, output):
        for part in options.parts:
            rows += {"numbers": numbers, "rates": rates}[part](options, device_of(gpu), folder, output)
    leave()
    wrong = sum(row.get("result", PASSED) != PASSED for row in rows)
    if wrong:
        sys.exit(f"divided_training: {wrong} comparisons failed" if first else 1)
    return rows


def device_of(gpu: bool) -> torch.device:
    """The device of this process."""
    return torch.device("cuda", dist.get_local_rank()) if gpu else torch.device("cpu")


if __name__ == "__main__":
    main()
