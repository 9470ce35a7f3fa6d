"""What a recipe takes of each device's memory, and sends over each device's links."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from data.cost import FLOAT, Cost, all_reduce_bytes, size_text
from recipes.algorithms.sharding.shard import in_32_bits
from recipes.config.recipe import FSDP, Recipe
from recipes.planning.costs import Costs, parameter_counts
from recipes.planning.devices import Devices
from recipes.planning.tensor_parallel import held, messages, recomputed, sent_bytes, sized_plan

NAMES = {"all_reduce": "all-reduces", "all_gather": "all-gathers", "reduce_scatter": "reduce-scatters"}


def memory_text(recipe: Recipe, task: nn.Module, costs: Costs, devices: Devices) -> str:
    """What weights, gradients and optimizer state take on each device, and under FSDP what is gathered there."""
    fsdp, shards, several = recipe.training.fsdp, devices.shards, microbatches_of(recipe, devices) > 1
    parameters, trained = parameter_counts(task)
    halves = 2 * costs.stored_16_bit  # bytes of the weights that take half as much, and of their gradients
    size = state_bytes(parameters, trained, held(task, task, devices) / parameters / shards, costs)
    unknown = f" (without the state of {recipe.optimizer.name}, which reports no cost)"
    state = f", {costs.optimizer.note}" if costs.optimizer.note else unknown
    low = f" (in 16 bits for the blocks' matrices, {size_text(halves)} each)" if halves else ""
    text = f"memory: {size_text(size)} on each device for weights, gradients{low}{state}"
    if devices.tensor > 1:
        text += f", matrices divided over {devices.tensor} devices"
    if fsdp is not None:
        gathered = gathered_at_once(fsdp, gathered_sizes(recipe, task, costs, devices))
        number = gathered_format(recipe, costs)
        number += " (fp32 outside of blocks)" if fsdp.wrap == "blocks" and number != "fp32" else ""
        of = "all" if devices.tensor == 1 else "that"
        text += f", 1/{shards} of {of}, and {size_text(gathered)} for gathered weights in {number}"
        if fsdp.sync == "batch" and several:
            text += f", {size_text(FLOAT * held(task, task, devices))} for gradients of all in fp32"
    elif devices.replicas > 1 and costs.buckets and (several or recipe.training.microbatch == "auto"):
        # Gradients of microbatches are summed outside of the buckets; with one microbatch they lie in them.
        text += f", and {size_text(FLOAT * trained)} for the buckets in which gradients are averaged"
    return f"{text}; activations come on top"


def start_lines(task: nn.Module, devices: Devices) -> Iterable[str]:
    """The host memory of a start, where the model is divided: the first process builds all of it, and sends parts."""
    if devices.shards * devices.tensor > 1:
        size = size_text(FLOAT * parameter_counts(task)[0])
        yield f"start: {size} of host memory on the first machine, for the whole model until it has been divided"


def full_checkpoint_lines(recipe: Recipe, size: int, devices: Devices) -> Iterable[str]:
    """The host memory of a full checkpoint of a divided model, which the first process gathers before it writes it.

    Args:
        recipe: of the run.
        size: bytes of a checkpoint, with averaged weights.
        devices: of the run.
    """
    fsdp, checkpoints = recipe.training.fsdp, recipe.checkpoints
    full = fsdp is None or fsdp.checkpoints == "full"
    if checkpoints.save and full and devices.shards * devices.tensor > 1:
        yield f"checkpoints: {size_text(size)} of host memory on the first machine for each, in which it is gathered"


def algorithm_lines(costs: Costs) -> Iterable[str]:
    """The memory that each algorithm takes, and its other notes."""
    for label, cost in costs.algorithms.items():
        note = f" {cost.note}" if cost.note else ""
        if cost.device_bytes:
            yield f"algorithms.{label}: {size_text(cost.device_bytes)} more on each device{note}"
        if cost.host_bytes:
            yield f"algorithms.{label}: {size_text(cost.host_bytes)} of host memory for each device{note}"
        yield from (f"algorithms.{label}: {line}" for line in cost.lines)


def traffic_lines(recipe: Recipe, task: nn.Module, costs: Costs, devices: Devices) -> Iterable[str]:
    """Bytes that each device sends per step: to the other shards of its replica, and to other replicas."""
    fsdp = recipe.training.fsdp
    if fsdp is not None and devices.shards > 1:
        units, values = gathered_sizes(recipe, task, costs, devices), held(task, task, devices)
        weights, gradients = shard_traffic(fsdp, devices, units, values, microbatches_of(recipe, devices))
        yield (
            f"within {devices.shards} shards: each device sends {size_text(weights)} of weights and "
            f"{size_text(gradients)} of gradients per step"
        )
    if devices.tensor > 1:
        yield _tensor_line(recipe, task, costs, devices)
    if devices.replicas > 1:
        cost = replica_traffic(task, costs, devices)
        sent = f"{size_text(cost.sent_bytes)} per step, {cost.sent_note}"
        yield f"between {devices.replicas} replicas: each device sends {sent}"


def _tensor_line(recipe: Recipe, task: nn.Module, costs: Costs, devices: Devices) -> str:
    """What each device sends to the others among which matrices are divided, and in how many messages."""
    plan, samples = sized_plan(recipe, task), recipe.training.device_batch(devices.world)
    low = recipe.training.precision in ("amp_bf16", "amp_fp16")
    value = 2 if low or costs.gathered else FLOAT
    passes, sequence = microbatches_of(recipe, devices), recipe.training.sequence_parallel
    again = recomputed(recipe, task)
    sent = sent_bytes(
        plan,
        samples,
        devices.tensor,
        value=value,
        loss_value=2 if low else FLOAT,
        table_value=2 if _gathers_tables_in_bf16(recipe, costs) else FLOAT,
        sequence=sequence,
        again=again,
        passes=passes,
    )
    found = messages(plan, samples // passes, devices.tensor, sequence, again)
    inside = [one for one in found if one.what == "branches"]
    sizes = {one.values: [other for other in inside if other.values == one.values] for one in inside}
    counts = ", ".join(
        " and ".join(f"{one.count} {NAMES[one.kind]}" for one in ones) + f" of {size_text(value * values)}"
        for values, ones in sizes.items()
    )
    return (
        f"within {devices.tensor} tensor parallel devices: each sends {size_text(sent)} per step; {counts} per "
        f"microbatch in {len(plan.branches)} branches"
    )


def state_bytes(parameters: int, trained: int, share: float, costs: Costs) -> float:
    """Bytes of weights, gradients and the optimizer's state on each device.

    Args:
        parameters: of the model.
        trained: number of those that are trained.
        share: of them that a device has.
        costs: of the recipe's components.
    """
    return (FLOAT * (parameters + trained) - 4 * costs.stored_16_bit) * share + costs.optimizer.device_bytes


def shard_traffic(fsdp: FSDP, devices: Devices, gathered: list[int], values: int, passes: int) -> tuple[float, float]:
    """Bytes of weights and of gradients that each device sends per step to the other shards of its replica.

    Args:
        fsdp: of the recipe.
        devices: of the run.
        gathered: see `gathered_sizes`.
        values: that a device would have if FSDP did not divide them.
        passes: of a step.
    """
    *blocks, rest = gathered
    reduced = 1 if fsdp.sync == "batch" else passes
    again = 2 * sum(blocks) + rest
    weights = passes * again if fsdp.strategy == "FULL_SHARD" else reduced * sum(gathered)
    share = (devices.shards - 1) / devices.shards
    return share * weights, reduced * share * FLOAT * values


def replica_traffic(task: nn.Module, costs: Costs, devices: Devices) -> Cost:
    """The cost, with bytes and a note, of averaging gradients with other replicas: that of an algorithm which does it,
    or that of the engine."""
    found = next((cost for cost in costs.algorithms.values() if cost.sent_bytes is not None), None)
    if found is not None:
        return found
    note = "in 16 bits for the blocks' matrices" if costs.stored_16_bit else "all in 32-bit"
    return Cost(sent_bytes=gradient_traffic(task, devices, costs.stored_16_bit), sent_note=note)


def gradient_traffic(task: nn.Module, devices: Devices, stored_16_bit: int = 0) -> float:
    """Bytes that each device sends per step to average its gradients with other replicas.

    Args:
        task: the model.
        devices: of the run.
        stored_16_bit: number of gradients that are stored in 16 bits instead of 32, without sharding.
    """
    divided = task.tensor_plan().dimensions() if devices.tensor > 1 else {}
    values = 0
    for p in task.parameters():
        if p.requires_grad:  # divided by its first dimension, as FSDP does
            rows = p.shape[0] if p.ndim else 1
            size = -(-rows // devices.shards) * (p.numel() // max(rows, 1))
            values += -(-size // devices.tensor) if id(p) in divided else size
    return all_reduce_bytes(FLOAT * values - 2 * stored_16_bit, devices.replicas)


def gathered_format(recipe: Recipe, costs: Costs) -> str:
    """Number format of the weights that FSDP gathers: of blocks, or of all but norms if the model is one unit. See
    `recipes.config.recipe.FSDP.parameters`."""
    fsdp = recipe.training.fsdp
    if fsdp.parameters != "auto":
        return fsdp.parameters
    if costs.gathered and fsdp.wrap == "blocks":
        return costs.gathered
    return "bf16" if recipe.training.precision == "amp_bf16" else "fp32"


def _gathers_tables_in_bf16(recipe: Recipe, costs: Costs) -> bool:
    fsdp = recipe.training.fsdp
    return fsdp is not None and fsdp.wrap == "model" and gathered_format(recipe, costs) == "bf16"


def gathered_sizes(recipe: Recipe, task: nn.Module, costs: Costs, devices: Devices) -> list[int]:
    """Bytes of each unit that FSDP gathers at once: the blocks, then all else. See `recipes.algorithms.sharding`."""
    parts = list(task.blocks()) if recipe.training.fsdp.wrap == "blocks" else []
    if gathered_format(recipe, costs) == "fp32":
        values = [held(part, task, devices) for part in parts]
        return [FLOAT * count for count in (*values, held(task, task, devices) - sum(values))]
    low = [held(part, task, devices) - _values_in_32_bits(part) for part in parts or [task]]
    rest = FLOAT * (held(task, task, devices) - sum(low))
    return [*(2 * count for count in low), rest] if parts else [2 * low[0] + rest]


def _values_in_32_bits(whole: nn.Module) -> int:
    """Number of the parameters in a block or the model that FSDP gathers in 32 bits in any case. Tensor parallelism
    divides none of them."""
    return sum(p.numel() for module in in_32_bits(whole) for p in module.parameters(recurse=False))


def gathered_at_once(fsdp: FSDP, gathered: list[int]) -> int:
    """Bytes of gathered weights that a device has at most at the same time.

    FULL_SHARD frees a block after it has been computed, while the next one is gathered. What lies outside of the blocks
    is there while they compute.

    Args:
        fsdp: of the recipe.
        gathered: see `gathered_sizes`.
    """
    *blocks, rest = gathered
    of_blocks = sum(blocks)
    if fsdp.strategy == "FULL_SHARD":
        of_blocks = min(of_blocks, 2 * max(blocks, default=0))
    return of_blocks + rest


def microbatches_of(recipe: Recipe, devices: Devices) -> int:
    """Microbatches per step on each device; 1 where their size is still to be measured."""
    microbatch = recipe.training.microbatch
    return -(-recipe.training.device_batch(devices.world) // microbatch) if isinstance(microbatch, int) else 1
