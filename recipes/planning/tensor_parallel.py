"""Whether a recipe can be trained with `training.tensor_parallel`, and what its devices send each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torch import nn

from data.cost import FLOAT
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe
from recipes.models.task import Task
from recipes.models.tensor_plan import TensorPlan
from recipes.planning.batches import blank_batch
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
    devices.check_groups(recipe.training)
    if recipe.training.precision == "amp_fp16":
        # GradScaler asks those devices whether gradients overflow between which the first parameter is sharded. If it
        # is replicated, as most are, each device of a group decides by itself, and their weights drift apart.
        raise ValueError(
            f"{asked} does not work with training.precision: amp_fp16, under which each device may skip an update by "
            "itself; use amp_bf16 or fp32"
        )
    for label, algorithm in recipe.algorithms.items():
        if algorithm.name in REFUSED:
            raise ValueError(
                f"{asked} does not work with {algorithm.name}, because {REFUSED[algorithm.name]}; remove one of them "
                f"(algorithms.{label}=null)"
            )
        if algorithm.name == "resblock_grad_scaling" and algorithm.args.get("weights") == "fp16":
            raise ValueError(f"{asked} does not work with weights: fp16 of algorithms.{label}; use fp32")
    plan.check(devices.tensor, devices.shards, recipe.training.sequence_parallel)


def sized_plan(recipe: Recipe, task: Task) -> TensorPlan:
    """The plan of a task that has one, with the numbers of positions that the recipe's data has."""
    plan = task.tensor_plan()
    return plan if plan.lengths is None else plan.for_batch(blank_batch(recipe, task, 1))


def held(module: nn.Module, task: nn.Module, devices: Devices) -> int:
    """Number of a module's parameters that a device would hold if FSDP did not shard them.

    Args:
        module: the task, or a part of it.
        task: the model.
        devices: of the run.
    """
    divided = task.tensor_plan().dimensions() if devices.tensor > 1 else {}
    return sum(-(-p.numel() // devices.tensor) if id(p) in divided else p.numel() for p in module.parameters())


def keep_part(task: nn.Module, devices: int) -> None:
    """Give each matrix that the plan divides the shape of one device's part, so that a call computes what one of the
    devices does, without the messages.

    Args:
        task: on the meta device; its matrices are replaced.
        devices: that divide each matrix; the model's sizes have been checked.
    """
    plan = task.tensor_plan()
    for branch in plan.branches:
        for layer in branch.columns:
            _shrink(layer, layer.in_features, layer.out_features // devices)
        _shrink(branch.rows, branch.rows.in_features // devices, branch.rows.out_features)
    if plan.vocabulary is not None:
        _shrink(plan.vocabulary, plan.vocabulary.in_features, -(-plan.vocabulary.out_features // devices))


def _shrink(layer: nn.Linear, inputs: int, outputs: int) -> None:
    layer.in_features, layer.out_features = inputs, outputs
    layer.weight = nn.Parameter(layer.weight.new_empty(outputs, inputs))
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.new_empty(outputs))


def divided_share(task: nn.Module, devices: Devices) -> float:
    """Share of the parameters that the devices of a tensor parallel group divide; 1 without such groups."""
    if devices.tensor == 1:
        return 1.0
    dimensions = task.tensor_plan().dimensions()
    counts = [(p.numel(), id(p) in dimensions) for p in task.parameters()]
    return sum(count for count, divided in counts if divided) / sum(count for count, _ in counts)


@dataclass(frozen=True)
class Message:
    """A kind of message in a forward and backward pass of one microbatch.

    Attributes:
        kind: all_reduce, all_gather or reduce_scatter.
        count: number of them.
        values: of the whole tensor that is reduced, gathered or scattered.
        what: "branches", "table" or "hidden": values in the dtype of the products in branches, of the table that embeds
            tokens, or of those that predict tokens; "stream", "losses", "parameters": 32-bit numbers.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    count: int
    values: int
    what: Literal["branches", "table", "hidden", "stream", "losses", "parameters"]

    def sent(self, value_bytes: int, devices: int) -> float:
        """Bytes that each device sends by rings."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return self.count * rounds * (devices - 1) / devices * self.values * value_bytes


def recomputed(recipe: Recipe, task: Task) -> set[nn.Module]:
    """The modules that activation checkpointing computes again in the backward pass, if the recipe has it."""
    every = [a.args.get("every", 1) for a in recipe.algorithms.values() if a.name == "activation_checkpointing"]
    return {module for one in every for block in task.recomputed_blocks()[::one] for module in block.modules()}


def messages(
    plan: TensorPlan, samples: int, devices: int, sequence: bool = False, again: Collection[nn.Module] = ()
) -> list[Message]:
    """The messages of a forward and backward pass.

    Each branch has one all-reduce in the forward pass, where it is left, and one in the backward pass, where it is
    entered: four per layer of attention and MLP (Shoeybi et al. 2019, section 3). With sequence parallelism, each of
    them is a reduce-scatter and an all-gather, and the branch's input is gathered a second time for the backward pass
    (Korthikanti et al. 2022, section 4.2.2); gradients of norms and of biases are summed. Activation checkpointing
    changes these numbers for branches only whose output their block needs again.

    A module whose output enters several branches has one in the backward pass for all of them.

    Args:
        plan: of the model, with its numbers of positions.
        samples: of the microbatch.
        devices: of the group.
        sequence: whether positions of the residual stream are divided.
        again: modules that are computed again in the backward pass.
    """
    of_text = sum(branch.of_text for branch in plan.branches)
    branches, stream = len(plan.branches) - of_text, samples * plan.positions * plan.width
    repeated = Counter(branch.of_text for branch in plan.branches if branch.needed_again and branch.module in again)
    text = samples * plan.text_positions * plan.width
    found = []
    if sequence:
        biased = sum(branch.rows.bias is not None for branch in plan.branches)
        found += [
            Message("all_gather", 3 * branches, stream, "branches"),
            Message("reduce_scatter", 2 * branches, stream, "branches"),
            Message("all_gather", 1, stream, "stream"),  # the gradient where the stream begins
            Message("all_reduce", branches + 1, 2 * plan.width, "parameters"),
            Message("all_reduce", biased, plan.width, "parameters"),
        ]
    else:
        found.append(Message("all_reduce", 2 * branches + repeated[False], stream, "branches"))
    if of_text:
        found.append(Message("all_reduce", 2 * of_text + repeated[True], text, "branches"))
    if plan.enters:
        found.append(Message("all_reduce", len(plan.enters), text, "stream"))
    if plan.embeds:
        found.append(Message("all_reduce", 1, stream, "table"))
    if plan.vocabulary is not None:
        rows = samples * plan.predicted
        found.append(Message("all_gather", 1, devices * 2 * rows, "losses"))
        if sequence:
            found += [Message(kind, 1, stream, "hidden") for kind in ("all_gather", "reduce_scatter")]
        else:
            found.append(Message("all_reduce", 1, rows * plan.width, "hidden"))
    return found


def sent_bytes(
    plan: TensorPlan,
    samples: int,
    devices: int,
    *,
    value: int,
    loss_value: int,
    table_value: int = FLOAT,
    sequence: bool = False,
    again: Collection[nn.Module] = (),
    passes: int = 1,
) -> float:
    """Bytes that each device sends to the others of its tensor parallel group for some samples, by rings.

    Args:
        plan: of the model.
        samples: forward and backward passes of single samples.
        devices: of the group.
        value: bytes of a value in a branch.
        loss_value: bytes of a value of the hidden vectors, from which tokens are predicted.
        table_value: bytes of a value of a divided table that embeds tokens.
        sequence: whether positions of the residual stream are divided.
        again: modules that are computed again in the backward pass.
        passes: microbatches, each of which sends gradients of parameters.
    """
    sizes = {"branches": value, "table": table_value, "hidden": loss_value}
    sizes |= {"stream": FLOAT, "losses": FLOAT, "parameters": FLOAT * passes}
    found = messages(plan, samples, devices, sequence, again)
    return sum(message.sent(sizes[message.what], devices) for message in found)
