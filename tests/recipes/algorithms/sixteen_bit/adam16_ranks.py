"""Run on two ranks by powersgd/test_lever.py: Adam16 on shards of FSDP2 equals Adam16 on the whole model."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recipes.algorithms.optimizers import adam16
from recipes.algorithms.sharding.shards import own
from tests.recipes.algorithms.residual import Residual, loss_of

STATES = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def sharded() -> Residual:
    model = Residual(width=5)  # 5 and 10 rows, 11 words: nothing divides by two ranks
    for block in model.blocks():
        fully_shard(block)
    return fully_shard(model)


def step_of(model, optimizer, gradients) -> None:
    """Step with given gradients, so that only the optimizers can differ."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if isinstance(parameter, DTensor):
            gradient = torch.distributed.tensor.distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.grad = gradient.clone()
    optimizer.step()


def loaded(parts, optimizer, new):
    """Another model, and another optimizer of `new`, with what a full checkpoint holds of these."""
    options = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(parts, options=options), get_optimizer_state_dict(parts, optimizer, options=options)
    parts = sharded()
    optimizer = new(parts)
    set_model_state_dict(parts, saved[0], options=STATES)
    set_optimizer_state_dict(parts, optimizer, saved[1], options=STATES)
    return parts, optimizer


def check_shards() -> None:
    whole, parts = Residual(width=5), sharded()
    optimizers = [adam16(m.parameters(), m, lr=3e-3, compiled=False) for m in (whole, parts)]
    for step in range(6):
        gradients = torch.autograd.grad(loss_of(whole, step), list(whole.parameters()))
        for model, optimizer in zip((whole, parts), optimizers, strict=True):
            step_of(model, optimizer, gradients)
        if step == 2:  # to a full checkpoint and back, on new objects
            parts, optimizers[1] = loaded(
                parts, optimizers[1], lambda parts: adam16(parts.parameters(), parts, lr=1.0, compiled=False)
            )
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a.detach(), b.full_tensor().detach())
        for name in ("mean", "variance"):
            wanted, found = optimizers[0].state[a][name], optimizers[1].state[b][name]
            assert found.dtype == wanted.dtype and found.placements == b.placements
            assert torch.equal(wanted, found.full_tensor()), name
    held = [sum(own(s[name]).nbytes for s in o.state.values() for name in ("mean", "variance")) for o in optimizers]
    size = torch.tensor(float(held[1]))
    dist.all_reduce(size)
    assert size == held[0]
