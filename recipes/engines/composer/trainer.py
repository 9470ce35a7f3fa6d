"""From a checked recipe to a Composer Trainer: the only place that knows every part."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from composer import Callback, DataSpec, Evaluator, Trainer
from composer.utils import dist, reproducibility

from callbacks.generators import Generators
from callbacks.interval import CHECKPOINT, at_intervals, ended
from data.files import write_text
from data.loading import Loading, Placement
from data.log import log
from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.gradients.order import in_gradient_order
from recipes.algorithms.microbatch.search import MicrobatchSearch
from recipes.algorithms.sharding.fsdp import Sharding
from recipes.config.build import build, build_on_meta, encoders_of
from recipes.config.recipe import Recipe, to_yaml
from recipes.engines.composer.model import ComposerTask
from recipes.planning.opening import CONFIG, opening


def train(recipe: Recipe) -> None:
    """Train a recipe to its end; a run that has reached it already is left as it is.

    Raises:
        ValueError: as `build_trainer`.
    """
    trainer = build_trainer(recipe)
    if ended(trainer.state):
        log.info(f"already trained to {recipe.training.duration}: {recipe.output}")
    else:
        trainer.fit()
    trainer.close()


def build_trainer(recipe: Recipe) -> Trainer:
    """Everything a run needs, ready for `fit()`.

    Raises:
        ValueError: batch sizes that do not divide, data that does not fit the model, weights that do not load.
    """
    use_gpu = torch.cuda.is_available() if recipe.training.device == "auto" else recipe.training.device == "gpu"
    if use_gpu and not torch.cuda.is_available():
        raise ValueError("training.device: gpu was asked for, and PyTorch sees none; use auto or cpu")
    precision = recipe.training.precision
    if precision == "auto":
        precision = "amp_bf16" if use_gpu else "fp32"
    if not use_gpu and precision != "fp32":
        raise ValueError(f"training.precision: {precision} needs a GPU; use fp32 or auto on a CPU")
    dist.initialize_dist("gpu" if use_gpu else "cpu", timeout=600.0)
    reproducibility.seed_all(recipe.seed)  # the same initial weights on every rank
    batch = recipe.training.device_batch(dist.get_world_size())

    task = build(recipe.model)
    if recipe.checkpoints.load_weights:
        task.load_export(Path(recipe.checkpoints.load_weights))
    load = partial(
        Placement, batch=batch, rank=dist.get_global_rank(), world=dist.get_world_size(), seed=recipe.seed, pin=use_gpu
    )
    requirements = task.requirements()
    data: Loading = build(recipe.data, placement=load(training=True), requirements=requirements)
    evals = {
        label: build(component, placement=load(training=False), requirements=requirements)
        for label, component in recipe.evals.items()
    }
    context = {
        "task": task,
        "run_name": recipe.run_name,
        "output": recipe.output,
        "loading": data,
        "encoders": lambda: encoders_of(data.manifest),
        "blank": lambda: build_on_meta(recipe.model),
    }
    save_config(to_yaml(recipe), Path(recipe.output))
    log.info(opening(recipe, task, data, evals, world=dist.get_world_size(), precision=precision))
    microbatch, search = microbatches(recipe, task, batch, use_gpu)
    checkpoints = recipe.checkpoints
    schedule = build(recipe.schedule)
    algorithms = [build(algorithm, **context) for algorithm in recipe.algorithms.values()]
    if recipe.training.grad_clip is not None:
        algorithms.append(ClipByNorm(recipe.training.grad_clip))
    fsdp, sharding = recipe.training.fsdp, None
    if fsdp is not None:
        sharding = Sharding(
            task,
            full_shard=fsdp.strategy == "FULL_SHARD",
            by_block=fsdp.wrap == "blocks",
            parameters=fsdp.parameters,
            replicas=fsdp.replicas_in(dist.get_world_size(), dist.get_local_world_size()),
            sync=fsdp.sync,
            checkpoints=fsdp.checkpoints,
        )
        algorithms.append(sharding)  # after all that changes modules
    return Trainer(
        model=ComposerTask(task),
        train_dataloader=data_spec(data),
        eval_dataloader=[
            Evaluator(label=label, dataloader=data_spec(loading), device_eval_microbatch_size=microbatch)
            for label, loading in evals.items()
        ],
        eval_interval=at_intervals(recipe.training.eval_every),
        max_duration=recipe.training.duration,
        optimizers=build(recipe.optimizer, parameters=[p for p in task.parameters() if p.requires_grad], task=task),
        schedulers=schedule,
        algorithms=algorithms + search,
        algorithm_passes=[in_gradient_order],
        parallelism_config={"fsdp": sharding.composer_config()} if sharding else None,
        callbacks=[
            *(build(callback, **context) for callback in recipe.callbacks.values()),
            *([schedule] if isinstance(schedule, Callback) else []),  # one that watches the run
            Generators(),
        ],
        loggers=[build(logger, **context) for logger in recipe.loggers.values()],
        run_name=recipe.run_name,
        progress_bar=recipe.training.progress_bar,
        load_path=checkpoints.load_path,
        save_folder=f"{recipe.output}/checkpoints" if checkpoints.save else None,
        save_interval=at_intervals(checkpoints.every, CHECKPOINT),
        save_num_checkpoints_to_keep=checkpoints.keep,
        save_overwrite=not checkpoints.autoresume,
        autoresume=checkpoints.autoresume,
        device="gpu" if use_gpu else "cpu",
        precision=precision,
        device_train_microbatch_size=microbatch,
        seed=recipe.seed,
        dist_timeout=600.0,
    )


def data_spec(loading: Loading) -> DataSpec:
    """A loader as Composer takes it."""
    return DataSpec(
        loading.loader,
        microbatch_transforms=loading.on_device,
        split_batch=split,
        get_num_samples_in_batch=_samples,
    )


def split(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """A batch in parts of at most `size` samples."""
    return [{name: tensor[i : i + size] for name, tensor in batch.items()} for i in range(0, _samples(batch), size)]


def _samples(batch: dict[str, torch.Tensor]) -> int:
    return len(next(iter(batch.values())))


def microbatches(
    recipe: Recipe, task: torch.nn.Module, batch: int, use_gpu: bool
) -> tuple[int | None, list[MicrobatchSearch]]:
    """The microbatch that a run starts with (None: the whole device batch), and what changes it on the way."""
    if recipe.training.microbatch != "auto":
        return recipe.training.microbatch, []
    if use_gpu:
        return 1, [MicrobatchSearch(task, batch)]
    if dist.get_global_rank() == 0:
        print(
            f"microbatch: all {batch} samples of a device; auto measures a GPU's memory, and this is a CPU", flush=True
        )
    return None, []


def save_config(config: str, output: Path) -> None:
    """Write the resolved config as <output>/config.yaml, on the first rank."""
    if dist.get_global_rank() == 0:
        write_text(output / CONFIG, config)
