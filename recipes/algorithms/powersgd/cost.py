"""Memory of PowerSGD and its traffic between machines, for the dry run."""

from __future__ import annotations

from typing import Any

from data.cost import FLOAT, Cost, Plan, all_reduce_bytes, size_text
from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.powersgd.all_reduce import FORMATS
from recipes.algorithms.powersgd.block_gradients import first_device_shapes
from recipes.algorithms.powersgd.low_rank import LowRank


def powersgd_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """Memory of the errors that are added to the next gradient, and of the factors; traffic between replicas.

    See `data.cost`. For published numbers, see tables 1 and 2 of Ramesh et al. 2021.
    """
    values = sum(p.numel() for matrices in block_matrices(plan.task, "powersgd") for p in matrices)
    dimensions = plan.task.tensor_plan().dimensions() if plan.tensor > 1 else None
    shapes, others = first_device_shapes(plan.task, plan.shards // plan.tensor, plan.tensor, dimensions)
    compressor = LowRank(args["rank"] // plan.shards, wire=FORMATS[args["wire"]])
    errors = FORMATS[args["buffer"]].bits / 8 * values / plan.shards
    memory = {
        "device_bytes": errors + sum(map(compressor.factor_bytes, shapes)),
        "note": f"for what is not sent yet, in {args['buffer']}, and the factors, in 32-bit",
        "checkpoint_bytes": FLOAT * values,
    }
    if plan.replicas == 1:
        told = "WORLD_SIZE and LOCAL_WORLD_SIZE tell a dry run where the run will be"
        return Cost(**memory, lines=(f"{one_replica(args['clip'])}; {told}",))
    sent = sum(compressor.bytes_sent(block, plan.replicas) for block in shapes)
    full = all_reduce_bytes(FLOAT * sum(shape.numel() for block in shapes for shape in block), plan.replicas)
    rest = all_reduce_bytes(FLOAT * others, plan.replicas)
    note = (
        f"{size_text(sent)} for the blocks' matrices (uncompressed {size_text(full / 2)} in 16-bit, of which "
        f"{1 - 2 * sent / full:.0%} are saved, and {size_text(full)} in 32-bit) and {size_text(rest)} for the rest in "
        "32-bit"
    )
    return Cost(**memory, sent_bytes=sent + rest, sent_note=note)


def one_replica(clip: float | None) -> str:
    """Why a run with one replica is refused. `clip` is that of the lever, without which nothing else would clip."""
    instead = "" if clip is None else f", and clip by training.grad_clip={clip:g}"
    return (
        "there is only one replica of the model, so nothing is averaged; start more processes, under training.fsdp "
        f"with as many replicas as there are machines, or remove powersgd (algorithms.powersgd=null){instead}"
    )
