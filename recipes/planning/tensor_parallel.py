"""Whether a recipe can be trained with `training.tensor_parallel`, and what its devices send each other."""

from __future__ import annotations

from torch import nn

from data.cost import FLOAT, all_reduce_bytes
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe
from recipes.models.tensor_plan import TensorPlan
from recipes.planning.devices import Devices

# What changes how linear layers or norms compute, or keeps its own idea of which rank holds what.
REFUSED = {
    "fp8": "it multiplies whole matrices",
    "low_precision_norms": "it changes how norms compute",
}


def check_tensor_parallel(recipe: Recipe, devices: Devices, task: nn.Module | None = None) -> None:
    """Find what cannot go together, before anything is built.

    Args:
        recipe: checked by itself.
        devices: of the run.
        task: the model, on any device; None: it is built without memory for weights.

    Raises:
        ValueError: a model that cannot be divided, sizes that the devices do not divide, gradients that nothing would
            average, or an algorithm that does not work on divided matrices.
    """
    if devices.tensor == 1:
        return
    asked = f"training.tensor_parallel: {devices.tensor}"
    plan = (build_on_meta(recipe.model) if task is None else task).tensor_plan()
    if plan is None:
        raise ValueError(f"{asked}: the model {recipe.model.name} does not say how its matrices can be divided; give 1")
    if recipe.training.fsdp is None and devices.replicas > 1:
        raise ValueError(
            f"{asked} leaves {devices.replicas} groups of devices, between which only FSDP averages gradients; set "
            "training.fsdp={}"
        )
    for label, algorithm in recipe.algorithms.items():
        if algorithm.name in REFUSED:
            raise ValueError(
                f"{asked} does not work with {algorithm.name}, because {REFUSED[algorithm.name]}; remove one of them "
                f"(algorithms.{label}=null)"
            )
        if algorithm.name == "resblock_grad_scaling" and algorithm.args.get("weights") == "fp16":
            raise ValueError(f"{asked} does not work with weights: fp16 of algorithms.{label}; use fp32")
    plan.check(devices.tensor, devices.shards)


def held(module: nn.Module, task: nn.Module, devices: Devices) -> int:
    """Number of a module's parameters that a device would hold if FSDP did not shard them.

    Args:
        module: the task, or a part of it.
        task: the model.
        devices: of the run.
    """
    divided = task.tensor_plan().dimensions() if devices.tensor > 1 else {}
    return sum(-(-p.numel() // devices.tensor) if id(p) in divided else p.numel() for p in module.parameters())


def divided_share(task: nn.Module, devices: Devices) -> float:
    """Share of the parameters that the devices of a tensor parallel group divide; 1 without such groups."""
    if devices.tensor == 1:
        return 1.0
    dimensions = task.tensor_plan().dimensions()
    counts = [(p.numel(), id(p) in dimensions) for p in task.parameters()]
    return sum(count for count, divided in counts if divided) / sum(count for count, _ in counts)


def messages(plan: TensorPlan, samples: int) -> tuple[int, int]:
    """The all-reduces of a forward and backward pass in the divided branches: their number, and the values of each.

    Each branch has one in the forward pass, where it is left, and one in the backward pass, where it is entered: four
    per layer of attention and MLP (Shoeybi et al. 2019, section 3).

    Args:
        plan: of the model.
        samples: of the microbatch.
    """
    return 2 * len(plan.branches), samples * plan.positions * plan.width


def sent_bytes(plan: TensorPlan, samples: int, devices: int, *, value: int, loss_value: int) -> float:
    """Bytes that each device sends to the others of its tensor parallel group for some samples, by rings.

    The loss adds one all-gather of two 32-bit numbers per predicted token, and one all-reduce of the gradient of the
    hidden vectors.

    Args:
        plan: of the model.
        samples: forward and backward passes of single samples.
        devices: of the group.
        value: bytes of a value in a branch.
        loss_value: bytes of a value of the hidden vectors, from which tokens are predicted.
    """
    count, values = messages(plan, samples)
    sent = count * all_reduce_bytes(value * values, devices)
    if plan.vocabulary is not None:
        rows = samples * plan.predicted
        sent += (devices - 1) * 2 * FLOAT * rows + all_reduce_bytes(loss_value * rows * plan.width, devices)
    return sent
