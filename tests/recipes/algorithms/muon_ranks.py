"""Run on two ranks by the fixture `two_ranks`: Muon on shards of FSDP2, and on copies of the model of which each rank
computes a part of the updates, equals Muon of one process."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from recipes.algorithms import muon as module
from recipes.algorithms.optimizers import muon
from recipes.algorithms.sharding.shards import own
from tests.recipes.algorithms.residual import Residual, loss_of
from tests.recipes.algorithms.sixteen_bit.adam16_ranks import loaded, sharded, step_of


def new(model):
    return muon(model.parameters(), model, lr=0.02, adamw_lr=3e-3, weight_decay=0.1, matrices="all")


def shards(_) -> None:
    whole, parts = Residual(width=5), sharded()
    optimizers = [new(model) for model in (whole, parts)]
    for step in range(6):
        gradients = torch.autograd.grad(loss_of(whole, step), list(whole.parameters()))
        for model, optimizer in zip((whole, parts), optimizers, strict=True):
            step_of(model, optimizer, gradients)
        if step == 2:  # to a full checkpoint and back, on new objects
            parts, optimizers[1] = loaded(parts, optimizers[1], new)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        # PyTorch's AdamW rounds in another way where the length of a shard is no multiple of a vector's.
        exact = "momentum" in optimizers[0].state[a]
        tolerance = {"rtol": 0 if exact else 1e-6, "atol": 0 if exact else 1e-7}
        torch.testing.assert_close(a.detach(), b.full_tensor().detach(), **tolerance)
        for name, wanted in optimizers[0].state[a].items():
            found = optimizers[1].state[b][name]
            if name != "step":
                assert found.placements == b.placements
                found = found.full_tensor()
            torch.testing.assert_close(wanted, found, **tolerance)
    held = [sum(own(v).nbytes for s in o.state.values() for k, v in s.items() if k != "step") for o in optimizers]
    size = torch.tensor(float(held[1]))
    dist.all_reduce(size)
    assert size == held[0]


def copies(_) -> None:
    alone, copy = Residual(width=5), Residual(width=5)
    optimizers = [new(model) for model in (alone, copy)]
    for step in range(4):
        gradients = torch.autograd.grad(loss_of(alone, step), list(alone.parameters()))
        with patch.object(module, "world_size", lambda: 1), patch.object(module, "rank", lambda: 0):
            step_of(alone, optimizers[0], gradients)
        with patch.object(module, "orthogonal", wraps=module.orthogonal) as orthogonal:
            step_of(copy, optimizers[1], gradients)
        # Two blocks have a matrix of each of two shapes, and the head is one of its own.
        counts = [[1, 1, 1], [1, 1]][dist.get_rank()]
        assert [len(call.args[0]) for call in orthogonal.call_args_list] == counts
    for a, b in zip(alone.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # products of one matrix and of several at a time
    first = torch.cat([p.detach().flatten() for p in copy.parameters()])
    dist.broadcast(first, 0)
    assert torch.equal(first, torch.cat([p.detach().flatten() for p in copy.parameters()]))


CHECKS = {"muon: shards": shards, "muon: copies": copies}
