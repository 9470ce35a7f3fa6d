"""What a recipe takes of each device's memory, and sends over each device's links."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.powersgd.block_gradients import layout
from recipes.algorithms.powersgd.low_rank import LowRank
from recipes.algorithms.powersgd.wire import bytes_sent
from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9
from recipes.config.recipe import Recipe, Training
from recipes.config.values import Component

FLOAT = 4  # bytes of a 32-bit number, the format of weights, gradients and most optimizers' state


@dataclass(frozen=True)
class Devices:
    """Where a run takes place.

    Attributes:
        world: devices.
        replicas: groups of them that each hold the whole model, divided over the group.
    """

    world: int
    replicas: int

    @property
    def shards(self) -> int:
        """Devices that a weight is divided over."""
        return self.world // self.replicas

    @classmethod
    def of_environment(cls, training: Training) -> Devices:
        """As launchers say it: WORLD_SIZE devices (else 1), LOCAL_WORLD_SIZE in each machine (else all).

        Raises:
            ValueError: replicas that do not divide the devices.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        machine = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        replicas = world if training.fsdp is None else training.fsdp.replicas_in(world, machine)
        return cls(world, replicas)


@dataclass(frozen=True)
class Moments:
    """The optimizer's two moments of every trained parameter.

    Attributes:
        size: bytes.
        text: how they are stored.
    """

    size: int
    text: str


def moments(recipe: Recipe, task: nn.Module) -> Moments:
    """Moments of AdamW, or of `adam16`."""
    trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
    if recipe.optimizer.name != "adam16":
        return Moments(2 * FLOAT * trained, "two moments in fp32")
    low = sum(p.numel() for matrices in block_matrices(task, "adam16") for p in matrices)
    return Moments(2 * (2 * low + FLOAT * (trained - low)), "two moments (of the blocks' matrices in 16 bits) in fp32")


def passes_of(recipe: Recipe, devices: Devices) -> int:
    """Microbatches of a device's batch; 1 where they are still to be measured."""
    microbatch = recipe.training.microbatch
    return -(-recipe.training.device_batch(devices.world) // microbatch) if isinstance(microbatch, int) else 1


def memory_text(recipe: Recipe, task: nn.Module, state: int, devices: Devices) -> str:
    """What weights, gradients and optimizer state take on each device, and under FSDP what it gathers."""
    fsdp, shards = recipe.training.fsdp, devices.shards
    stored = moments(recipe, task).text
    text = f"memory: {gigabytes(state / shards)} on each device for weights, gradients, {stored}"
    if fsdp is not None:
        sizes = gathered_sizes(recipe, task)
        whole = fsdp.wrap == "model" or fsdp.strategy == "SHARD_GRAD_OP"
        unit = sum(sizes) if whole else max(sizes)
        whose = "gathered weights" if fsdp.strategy == "SHARD_GRAD_OP" else "the largest gathered unit"
        number = gathered_format(recipe)
        number += " (fp32 outside of blocks)" if number == "fp16" else ""
        text += f", 1/{shards} of all, and {gigabytes(unit)} for {whose} in {number}"
        if fsdp.sync == "batch" and passes_of(recipe, devices) > 1:
            text += f", {gigabytes(FLOAT * _count(task))} for gradients of all in fp32"
    return f"{text}; activations come on top"


def gathered_format(recipe: Recipe) -> str:
    """Number format of the weights that FSDP gathers, outside of norms. See `recipes.config.recipe.FSDP.parameters`."""
    fsdp = recipe.training.fsdp
    if fsdp.parameters != "auto":
        return fsdp.parameters
    if _algorithm(recipe, "resblock_grad_scaling") and fsdp.wrap == "blocks":
        return "fp16"
    return "bf16" if recipe.training.precision == "amp_bf16" else "fp32"


def gathered_sizes(recipe: Recipe, task: nn.Module) -> list[int]:
    """Bytes of each unit that FSDP gathers at once: the blocks, then what lies outside of them."""
    number = gathered_format(recipe)
    counts = [_count(block) for block in task.blocks()] if recipe.training.fsdp.wrap == "blocks" else []
    rest = _count(task) - sum(counts)
    low = FLOAT if number == "fp32" else 2
    return [low * count for count in counts] + [(FLOAT if number == "fp16" else low) * rest]


def average_of(recipe: Recipe) -> Component | None:
    """The algorithm that averages the weights, where the recipe has one."""
    return _algorithm(recipe, "scheduled_ema")


def average_lines(recipe: Recipe, size: int, devices: Devices) -> Iterable[str]:
    """Where the averaged weights lie, how large they are on each device, and from when on."""
    ema = average_of(recipe)
    if ema is None:
        return
    part = size / devices.shards
    begin = "from the start on"
    if ema.args.get("last"):
        begin = f"in the last {ema.args['last']}"
    elif ema.args.get("start"):
        begin = f"from {ema.args['start']} on"
    if ema.args.get("device") == "cpu":
        yield f"average: {gigabytes(2 * part)} of host memory for each device (the average and a copy), {begin}"
    else:
        yield f"average: {gigabytes(part)} more on each device, {begin}"


def left_over(recipe: Recipe, task: nn.Module) -> int:
    """Values of what `powersgd` has not sent yet: one for each of the blocks' matrices'."""
    if _algorithm(recipe, "powersgd") is None:
        return 0
    return sum(p.numel() for matrices in block_matrices(task, "powersgd") for p in matrices)


def left_over_lines(recipe: Recipe, values: int, devices: Devices) -> Iterable[str]:
    """What they take on each device."""
    averaging = _algorithm(recipe, "powersgd")
    if averaging is not None:
        number = averaging.args.get("buffer", "1-6-9")
        size = (FLOAT if number == "32-bit" else 2) * values / devices.shards
        yield f"powersgd: {gigabytes(size)} more on each device for what is not sent yet, in {number}"


def traffic_lines(recipe: Recipe, task: nn.Module, devices: Devices) -> Iterable[str]:
    """Bytes that each device sends in a step: within its shards, and to other replicas."""
    fsdp = recipe.training.fsdp
    if fsdp is not None and devices.shards > 1:
        passes = passes_of(recipe, devices)
        reduced = 1 if fsdp.sync == "batch" else passes
        gathered = 2 * passes if fsdp.strategy == "FULL_SHARD" else reduced
        share = (devices.shards - 1) / devices.shards
        weights = gathered * share * sum(gathered_sizes(recipe, task))
        gradients = reduced * share * FLOAT * _count(task)
        yield (
            f"within {devices.shards} shards: each device sends {gigabytes(weights)} of weights and "
            f"{gigabytes(gradients)} of gradients a step"
        )
    averaging = _algorithm(recipe, "powersgd")
    if devices.replicas == 1:
        if averaging is not None:
            yield "powersgd: refused with one replica, as here; WORLD_SIZE and LOCAL_WORLD_SIZE say where a run will be"
        return
    shapes, others = layout(task, devices.shards)
    values = sum(shape.numel() for block in shapes for shape in block)
    others_sent = bytes_sent(others, devices.replicas, FLOAT_32)
    plain = bytes_sent(values, devices.replicas, FLOAT_32)
    if averaging is None:
        sent = gigabytes(plain + others_sent)
        yield f"between {devices.replicas} replicas: each device sends {sent} a step, all in 32-bit"
        return
    wire = FLOAT_32 if averaging.args.get("wire") == "32-bit" else MEAN_1_6_9
    compressor = LowRank(averaging.args["rank"] // devices.shards, wire=wire)
    sent = sum(compressor.bytes_sent(block, devices.replicas) for block in shapes)
    yield (
        f"between {devices.replicas} replicas: each device sends {gigabytes(sent + others_sent)} a step, "
        f"{gigabytes(sent)} for the blocks' matrices (uncompressed {gigabytes(plain / 2)} in 16-bit, of which "
        f"{1 - 2 * sent / plain:.0%} are saved, and {gigabytes(plain)} in 32-bit) and {gigabytes(others_sent)} for the "
        "rest in 32-bit"
    )


def gigabytes(size: float) -> str:
    """Bytes as MB or GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _algorithm(recipe: Recipe, name: str) -> Component | None:
    return next((a for a in recipe.algorithms.values() if a.name == name), None)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
