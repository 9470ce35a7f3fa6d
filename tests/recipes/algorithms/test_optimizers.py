"""The optimizers that recipes name; `adam16` has tests of its own."""

import copy

import pytest
import torch

from recipes.algorithms.optimizers import adam16, adamw
from tests.recipes.algorithms.residual import Residual


def test_fused_adamw_is_adamw():
    """In channels_last, over steps whose bias correction matters, and from a state of the other kind."""

    def train(fused, load=None, steps=20):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 5, 1))
        net.to(memory_format=torch.channels_last)
        optimizer = adamw(net.parameters(), lr=0.01, weight_decay=0.1, fused=fused)
        if load is not None:
            net.load_state_dict(load[0])
            optimizer.load_state_dict(copy.deepcopy(load[1]))  # it would write into what it was given
            optimizer.param_groups[0]["fused"] = fused
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            net(torch.randn(2, 3, 6, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net, optimizer

    assert train(fused=True)[1].param_groups[0]["fused"] and not train(fused=False)[1].param_groups[0]["fused"]
    saved = [part.state_dict() for part in train(fused=False)]
    for load in (None, saved):
        one, other = (torch.cat([p.detach().flatten() for p in train(f, load)[0].parameters()]) for f in (True, False))
        # One rounding per step of values around 1; a fifth of that is seen.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert (
            one - torch.cat([p.detach().flatten() for p in train(True, load, 1)[0].parameters()])
        ).abs().max() > 0.01


def test_vectors_do_not_decay_where_they_are_left_out():
    """Without gradients to follow, AdamW only multiplies by 1 - lr * weight_decay."""

    def after_a_step(**arguments):
        torch.manual_seed(0)
        sizes = {"scale": (), "bias": (4,), "matrix": (4, 3), "kernel": (2, 3, 1)}
        parts = {name: torch.rand(size) for name, size in sizes.items()}
        before = {name: tensor.clone() for name, tensor in parts.items()}
        trained = [torch.nn.Parameter(tensor) for tensor in parts.values()]
        for p in trained:
            p.grad = torch.zeros_like(p)
        adamw(iter(trained), lr=0.1, weight_decay=0.5, **arguments).step()
        return {name: (p / before[name]).detach() for name, p in zip(parts, trained, strict=True)}

    for arguments, kept in (({}, ()), ({"decay_vectors": False}, ("scale", "bias"))):
        for name, factor in after_a_step(**arguments).items():
            want = torch.full_like(factor, 1.0 if name in kept else 1 - 0.1 * 0.5)
            torch.testing.assert_close(factor, want, rtol=1e-6, atol=0)  # one rounding


def test_without_vectors_or_matrices_there_is_one_group():
    for size in ((3,), (3, 2)):
        optimizer = adamw([torch.nn.Parameter(torch.ones(size))], lr=0.1, decay_vectors=False)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0 if len(size) == 1 else 0.01]


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_adamw_has_all_settings_of_the_recipe(decay_vectors):
    wanted = {"lr": 0.2, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3, "fused": False}
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in ((3, 2), (3,))]
    groups = adamw(parameters, **wanted, decay_vectors=decay_vectors).param_groups
    assert [group["weight_decay"] for group in groups] == ([0.3] if decay_vectors else [0.3, 0.0])
    assert all(group[name] == wanted[name] for group in groups for name in wanted if name != "weight_decay")


def test_adam16_has_all_settings_of_the_recipe():
    wanted = {"lr": 0.2, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3, "variance_clip": 2.0}
    for compiled in (True, False):
        optimizer = adam16(Residual().parameters(), Residual(), **wanted, compiled=compiled)
        assert optimizer.compiled == compiled
        assert all(group[name] == wanted[name] for group in optimizer.param_groups for name in wanted)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)])
def test_decays_that_cannot_be(betas):
    with pytest.raises(ValueError, match=r"adamw: betas must lie in \[0, 1\)"):
        adamw([torch.nn.Parameter(torch.ones(3))], lr=0.1, betas=betas)
