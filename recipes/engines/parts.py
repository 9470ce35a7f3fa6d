"""Builds the parts of a run from a checked recipe, and gives each the others that it needs, for both engines."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.encoded.dataset import EncodedDataset, keys_of
from data.loading import Loading, Placement, end_idle_workers, let_workers_leave_signals
from data.own_gpu import check_own_gpu
from data.system.garbage_collection import rare_searches
from data.system.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.gradients.block_all_reduce import BlockAllReduce
from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.graphs.cuda_graphs import CudaGraphs
from recipes.algorithms.microbatch.search import MicrobatchSearch
from recipes.algorithms.modules.activation_checkpointing import ActivationCheckpointing
from recipes.algorithms.modules.compile import Compile
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.resilience.first_rate import FirstRate
from recipes.algorithms.resilience.guard import Guard
from recipes.algorithms.resilience.recipe_rates import RecipeRates
from recipes.algorithms.resilience.token_ids import TokenIds, looked_for
from recipes.algorithms.sharding.first_rank import FirstRankSends
from recipes.algorithms.sharding.fsdp import Sharding
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.algorithms.tensor_parallel.lever import TensorParallel
from recipes.config.build import build, build_on_meta, encoders_of
from recipes.config.recipe import Recipe, Training
from recipes.engines.check_classes import check_classes, check_names
from recipes.engines.check_loaders import check_loader, check_loaders
from recipes.engines.check_optimizers import check_first_step, check_kept, check_step
from recipes.engines.checkpoints.own_optimizers import keep_formats
from recipes.engines.first_weights import new_task, started_from
from recipes.engines.logs.loggers import Opener
from recipes.engines.logs.tracking import tracked_run
from recipes.engines.precision import resolve
from recipes.engines.record import check_encoders
from recipes.engines.resuming import prepare_folder, start_of
from recipes.models.task import Task
from recipes.planning.devices import Devices
from recipes.planning.tensor_parallel import check_tensor_parallel
from recipes.training.callback import Callback
from recipes.training.lever import Lever
from recipes.training.levers import Levers
from recipes.training.ranks import from_first_rank, rank, world_size
from recipes.training.run import Precision
from recipes.training.schedules import Schedule, checked


@dataclass(frozen=True)
class Place:
    """Where a run takes place, and in which number format.

    Attributes:
        use_gpu: each rank trains on a GPU.
        precision: resolved.
        local_world_size: ranks of this machine.
        planned: devices of the run; None: those of the processes that have started.
    """

    use_gpu: bool
    precision: Precision
    local_world_size: int
    planned: Devices | None = None

    def devices(self, training: Training) -> Devices:
        """The devices of the run. Raises as `Devices.of`."""
        return self.planned or Devices.of(training, world_size(), self.local_world_size)

    @classmethod
    def of(cls, recipe: Recipe, local_world_size: int) -> Place:
        """The place that a recipe asks for.

        Raises:
            ValueError: a GPU is asked for where PyTorch sees none, the run has several machines and this one none, or
                the machine has more processes than GPUs.
        """
        device, found = recipe.training.device, torch.cuda.is_available()
        use_gpu = found if device == "auto" else device == "gpu"
        if use_gpu and not found:
            raise ValueError("training.device: gpu was asked for, and PyTorch sees none; use auto or cpu")
        world = int(os.environ.get("WORLD_SIZE") or 1)
        if device == "auto" and not found and world > int(os.environ.get("LOCAL_WORLD_SIZE") or world):
            raise ValueError(
                f"training.device: PyTorch sees no GPU on {platform.node()}, and the run's other machines would wait "
                "for it if they have some; repair its driver, or set training.device=cpu"
            )
        if use_gpu:
            check_own_gpu("training.device")
        return cls(use_gpu, resolve(recipe.training.precision, use_gpu=use_gpu), local_world_size)


@dataclass
class Parts:
    """Everything of a run but its trainer.

    Attributes:
        task: with new weights, or those of an export; see `new_task`.
        data: training batches.
        evals: validation batches by label.
        levers: in the order in which they act.
        callbacks: by label.
        new_optimizer: makes the recipe's optimizer for the task's trained parameters, once those are what they will be.
        schedule: from the clock to the learning rate's factor.
        divided: whether each rank holds a part of the model only, by `training.fsdp` or `training.tensor_parallel`.
        copies: number of ranks that compute the same samples, `training.tensor_parallel`.
        loggers: what opens them, see `recipes.engines.logs.loggers`.
        microbatch: samples that a device takes at once at the start; None: its whole batch.
    """

    task: Task
    data: Loading
    evals: dict[str, Loading]
    levers: Levers
    callbacks: dict[str, Callback]
    new_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    schedule: Schedule
    divided: bool
    copies: int
    loggers: list[Opener]
    microbatch: int | None

    def end_workers(self) -> None:
        """End the data workers, which would wait for another epoch as long as this process runs."""
        for loading in (self.data, *self.evals.values()):
            end_idle_workers(loading.loader)


@rare_searches()  # components are imported when they are built
def build_parts(recipe: Recipe, place: Place, engine: str) -> Parts:
    """Build everything that a recipe names. Ranks must have been started, and seeded alike.

    Args:
        recipe: of the run.
        place: where it takes place.
        engine: that runs it, "composer" or "lightning".

    Raises:
        ValueError: batch sizes that do not divide, a model that cannot be sharded, data that does not fit the model,
            weights that do not load; the run goes on, and its recipe or data is not what it was.
    """
    training = recipe.training
    groups = training.groups(world_size(), place.local_world_size)
    batch = training.device_batch(world_size())
    check_tensor_parallel(recipe, place.devices(training))
    changed = prepare_folder(recipe, engine)
    copies = training.tensor_parallel
    divided = training.fsdp is not None or copies > 1
    sent = divided and world_size() > 1
    resumes = from_first_rank(start_of(recipe, engine, None) is not None)
    task = new_task(recipe, sent=sent, resumes=resumes)
    load = partial(
        Placement,
        batch=batch,
        rank=rank() // copies,
        world=groups,
        seed=recipe.seed,
        pin=place.use_gpu,
        copies=copies,
        output=Path(recipe.output),
    )
    requirements = task.requirements()
    data: Loading = build(recipe.data, placement=load(training=True), requirements=requirements)
    check_loader(data, recipe, engine)
    evals = {
        label: build(component, placement=load(training=False), requirements=requirements)
        for label, component in recipe.evals.items()
    }
    check_loaders(data, evals, recipe, engine, batch)
    check_encoders(recipe, data, evals)
    for loading in (data, *evals.values()):
        let_workers_leave_signals(loading.loader)  # those of one's own, too
    other_rates = recipe.checkpoints.load_path is not None or any(key.startswith("optimizer") for key in changed)
    settings = [RecipeRates()] if other_rates else []

    def new_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = build(recipe.optimizer, parameters=parameters, task=task)
        check_step(optimizer, on_cpu=not place.use_gpu)
        trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
        check_kept(optimizer, trained, keeps(recipe), sent)
        check_first_step(optimizer, task, keeps(recipe))
        keep_formats(optimizer)
        for lever in settings:
            lever.built(optimizer)
        return optimizer

    check_classes(recipe)
    check_microbatch(recipe, task, batch)
    context = context_of(recipe, task, data)
    levers = build_levers(recipe, place, context, batch)
    search = the_one(levers, MicrobatchSearch)
    context |= {"average": the_one(levers, ScheduledEMA), "scaling": the_one(levers, ResblockGradScaling)}
    schedule = build(recipe.schedule)
    factor, rates = checked(schedule, recipe.schedule.name), [*settings]
    if changed or recipe.checkpoints.load_path is not None:
        rates.append(FirstRate(factor, training.global_batch))
    if training.microbatch == "auto" and search is None:
        log.info(f"microbatch: all {batch} samples per device; auto measures a GPU's memory, and this is a CPU")
    dataset = getattr(data.loader, "dataset", None)
    encoded = isinstance(dataset, EncodedDataset)
    keys = partial(keys_of, dataset) if encoded else lambda seeds: {}
    looked = looked_for(task, data)
    ids = [TokenIds(looked)] if looked else []
    guard = Guard(training.nonfinite_limit, recipe.output, keys, context["scaling"])
    callbacks = {label: build(callback, **context) for label, callback in recipe.callbacks.items()}
    if isinstance(schedule, Callback):  # a schedule that watches the run
        callbacks["(schedule)"] = schedule  # `schedule` may be the label of another one
    check_names(levers, callbacks)
    return Parts(
        task=task,
        data=data,
        evals=evals,
        levers=Levers(levers, first=[guard, *rates, *ids], last=[FirstRankSends(task)] if sent else []),
        callbacks=callbacks,
        new_optimizer=new_optimizer,
        schedule=factor,
        divided=divided,
        copies=copies,
        loggers=[build(logger, **context) for logger in recipe.loggers.values()],
        microbatch=1 if search else None if training.microbatch == "auto" else training.microbatch,
    )


def keeps(recipe: Recipe) -> bool:
    """Whether a run saves or loads checkpoints."""
    return recipe.checkpoints.save or recipe.checkpoints.load_path is not None


def context_of(recipe: Recipe, task: Task, data: Loading | None) -> dict[str, Any]:
    """What builders may ask for by naming it as a parameter before their `*`; `data` is None where nothing is trained.

    Callbacks and loggers may also ask for what is found among the levers.
    """
    return {
        "task": task,
        "run_name": recipe.run_name,
        "output": recipe.output,
        "tracked": cache(partial(tracked_run, recipe)),  # each call would give a run that begins another identifier
        "loading": data,
        "copies": recipe.training.tensor_parallel,
        "encoders": None if data is None else lambda: encoders_of(data.manifest),
        "blank": lambda: build_on_meta(recipe.model),
        "started_from": started_from(recipe),
    }


def check_microbatch(recipe: Recipe, task: Task, batch: int) -> None:
    """Find microbatches of one sample, of which a model that compares samples learns nothing.

    Args:
        recipe: of the run.
        task: its model, on any device.
        batch: number of samples in the batch of a rank.

    Raises:
        ValueError: each sample, or the last of a batch, would be compared with itself alone: its loss is always 0.
    """
    key = "global_batch" if batch == 1 else "microbatch"
    size = recipe.training.microbatch
    last = batch % size if isinstance(size, int) else 0  # of the microbatches of a batch, the last may be smaller
    if task.compares_samples and 1 in (batch, size, last):
        when = "at a time" if 1 in (batch, size) else f"alone, the last of the {batch} of a device"
        raise ValueError(
            f"training.{key}: {getattr(recipe.training, key)} leaves the model one sample {when}, and its loss "
            "compares the samples of a microbatch with each other; give more"
        )


def build_levers(recipe: Recipe, place: Place, context: Mapping[str, Any], batch: int) -> list[Lever]:
    """The recipe's levers in its order, but fused_group_norm last, then those of its `training` section.

    Each has the others it works with. `batch` is the number of samples in the batch of a rank.
    """
    components = recipe.algorithms
    clips = recipe.training.grad_clip is not None
    low_rank = any(component.name == "powersgd" for component in components.values())
    context = {**context, "low_rank": low_rank, "clips": clips, "scaling": None, "samples": batch}
    built: dict[str, Lever] = {}
    for label in sorted(components, key=lambda label: components[label].name != "resblock_grad_scaling"):
        built[label] = build(components[label], **context)
        built[label].label_in_recipe = label
        context["scaling"] = the_one(built.values(), ResblockGradScaling)  # others ask for it
    # It fuses norms as other levers have left them, which then do not find them any more.
    order = sorted(components, key=lambda label: components[label].name == "fused_group_norm")
    levers = [built[label] for label in order]
    check_levers(recipe, place, levers)
    if clips:
        levers.append(ClipByNorm(recipe.training.grad_clip))
    if recipe.training.tensor_parallel > 1:
        levers.append(new_tensor_parallel(recipe, place, context["task"]))
    if recipe.training.fsdp is not None:
        levers.append(new_sharding(recipe, place, context["task"], levers))
    if recipe.training.microbatch == "auto" and place.use_gpu:
        average = the_one(levers, ScheduledEMA)
        to_compile = [lever for kind in (Compile, CudaGraphs) if (lever := the_one(levers, kind)) is not None]
        levers.append(MicrobatchSearch(context["task"], batch, average=average, compiled=to_compile))
    return levers


def check_levers(recipe: Recipe, place: Place, levers: list[Lever]) -> None:
    """
    Raises:
        ValueError: levers that cannot work with each other, or with the `training` section.
    """
    averaging = the_one(levers, PowerSGD)
    if averaging is not None:
        devices = place.devices(recipe.training)
        averaging.check_groups(
            devices=devices.world // devices.replicas,
            sharded=recipe.training.fsdp is not None,
            precision=place.precision,
        )
    divided = recipe.training.fsdp is not None or recipe.training.tensor_parallel > 1
    compiled = the_one(levers, Compile)
    if compiled is not None and divided:
        compiled.check_divided()
    all_reduce = the_one(levers, BlockAllReduce)
    if all_reduce is not None and (divided or averaging is not None):
        all_reduce.check_divided()
    graphs = the_one(levers, CudaGraphs)
    if graphs is not None:
        if divided:
            graphs.check_divided()
        graphs.check_levers(
            compiled,
            recomputes=the_one(levers, ActivationCheckpointing) is not None,
            averaged=all_reduce is not None,
            replicas=place.devices(recipe.training).replicas,
        )


def new_tensor_parallel(recipe: Recipe, place: Place, task: Task) -> TensorParallel:
    """The lever of `training.tensor_parallel`."""
    training = recipe.training
    devices = place.devices(training)
    return TensorParallel(
        task,
        devices=devices.tensor,
        replicas=devices.replicas,
        sharded=training.fsdp is not None,
        sequence=training.sequence_parallel,
    )


def new_sharding(recipe: Recipe, place: Place, task: nn.Module, levers: list[Lever]) -> Sharding:
    """The lever of `training.fsdp`.

    Raises:
        ValueError: replicas whose gradients nothing would average, or parameters in bf16 without autocast.
    """
    fsdp = recipe.training.fsdp
    replicas = place.devices(recipe.training).replicas
    averaging = the_one(levers, PowerSGD)
    if fsdp.parameters == "bf16" and place.precision == "fp32":
        raise ValueError(
            "training.fsdp.parameters: bf16, and the run is in fp32 without autocast, whose 32-bit activations cannot "
            "be multiplied by them; use auto or fp32, or set training.precision to amp_bf16"
        )
    if replicas > 1 and averaging is None and not place.use_gpu and torch.__version__ < (2, 8):
        raise ValueError(
            f"training.fsdp.replicas: {replicas} replicas, between which torch {torch.__version__} averages no "
            "gradients on a CPU; use replicas: 1, the algorithm powersgd, a GPU, or torch 2.8 or newer"
        )
    return Sharding(
        task,
        full_shard=fsdp.strategy == "FULL_SHARD",
        by_block=fsdp.wrap == "blocks",
        parameters=fsdp.parameters,
        replicas=replicas,
        sync=fsdp.sync,
        averaging=averaging,
        scaling=the_one(levers, ResblockGradScaling),
        tensor=the_one(levers, TensorParallel),
        compiled=the_one(levers, Compile),
    )


def the_one(levers: Iterable[Lever], kind: type) -> Any:
    """The lever of a kind, or None.

    Raises:
        ValueError: there are two.
    """
    found = [lever for lever in levers if isinstance(lever, kind)]
    if len(found) > 1:
        raise ValueError(f"algorithms: a run has at most one {kind.__name__}; remove the other")
    return found[0] if found else None
