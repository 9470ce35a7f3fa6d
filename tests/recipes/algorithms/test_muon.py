import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.cost import Plan
from recipes.algorithms import muon as module
from recipes.algorithms.muon import COEFFICIENTS, ITERATIONS, Muon, orthogonal
from recipes.algorithms.optimizers import muon, muon_cost
from tests.recipes.algorithms import muon_ranks
from tests.recipes.algorithms.residual import Residual, loss_of, train, vector


def exact(matrix: torch.Tensor) -> torch.Tensor:
    """`orthogonal` of one matrix, by its singular value decomposition in 64 bits."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return (u * values) @ v


@given(n=st.integers(1, 3), rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_singular_values_become_about_one(n, rows, columns, seed):
    matrices = torch.randn(n, rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)
    kept = matrices.clone()
    found = orthogonal(matrices)
    assert found.shape == matrices.shape and torch.equal(matrices, kept)
    for one, whole in zip(found, matrices, strict=True):
        # 32-bit rounding, which each of 5 iterations multiplies by its slope of up to 3.4.
        torch.testing.assert_close(one.double(), exact(whole), rtol=0, atol=3e-4)
        relative = torch.linalg.svdvals(whole) / whole.norm()
        values = torch.linalg.svdvals(one)[relative > 0.004]  # of which the polynomial makes 0.68 to 1.21
        assert values.min() > 0.67 and values.max() < 1.22


def test_zero_gradients_give_no_update():
    assert torch.equal(orthogonal(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def convolutions() -> torch.nn.Sequential:
    """Kernels of which two have one shape and one is in another order in memory, a matrix, and vectors."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3),
        torch.nn.Conv2d(6, 6, 3, padding=1).to(memory_format=torch.channels_last),
        torch.nn.GroupNorm(2, 6),
        torch.nn.Conv2d(6, 6, 3, padding=1),
        torch.nn.Flatten(),
        torch.nn.Linear(96, 5),
        torch.nn.Linear(5, 20),
    )


def groups(net) -> list[dict]:
    found = [[p for p in net.parameters() if (p.ndim > 1) == matrices] for matrices in (True, False)]
    return [{"params": params, "matrices": matrices} for params, matrices in zip(found, (True, False), strict=True)]


SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}


@pytest.mark.parametrize("together", [module.TOGETHER, 1])
def test_it_equals_a_loop_over_matrices_and_adamw(together, monkeypatch):
    monkeypatch.setattr(module, "TOGETHER", together)
    net, reference = convolutions(), convolutions()
    optimizer = Muon(groups(net), momentum=0.9, **SETTINGS)
    vectors = torch.optim.AdamW([p for p in reference.parameters() if p.ndim == 1], fused=True, **SETTINGS)
    means = {p: torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters() if p.ndim > 1}
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        images = torch.randn(2, 3, 6, 6, generator=generator)
        net(images).square().mean().backward()
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.clone()
            q.data.copy_(p.data)  # each step from the same weights: differences of one step, not of many
        optimizer.step()
        vectors.step()
        for q, mean in means.items():
            gradient = q.grad.double()
            mean.copy_(0.9 * mean + 0.1 * gradient)
            update = exact((0.1 * gradient + 0.9 * mean).flatten(1)).reshape(q.shape)
            scale = max(1, q.shape[0] / q.shape[1:].numel()) ** 0.5
            q.data.copy_(q.data.double() * (1 - 0.02 * 0.1) - 0.02 * scale * update)
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            if q.ndim == 1:
                assert torch.equal(p, q)
            else:  # `orthogonal` errs by up to 3e-4, see above, times a learning rate of 0.02 times up to 2
                torch.testing.assert_close(p, q, rtol=0, atol=1.2e-5)
        optimizer.zero_grad()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has Muon from 2.9 on")
def test_it_equals_pytorchs_muon():
    torch.manual_seed(0)
    one = [torch.nn.Parameter(torch.randn(size)) for size in ((8, 20), (20, 8), (8, 20))]
    other = copy.deepcopy(one)
    ours = Muon(one, lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(other, lr=0.02, weight_decay=0.1)
    for _ in range(5):
        for p, q in zip(one, other, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(one, other, strict=True):
        # PyTorch computes in bf16 on CPUs, too: an error of about 2^-8 per product relative to values up to 1.
        torch.testing.assert_close(p, q, rtol=0, atol=5 * 0.02 * 1.6 * 0.02)


@pytest.mark.parametrize("matrices", ["blocks", "all"])
def test_it_trains_and_goes_on(matrices):
    def new():
        model = Residual()
        return model, muon(model.parameters(), model, lr=0.05, adamw_lr=0.03, matrices=matrices)

    model, optimizer = new()
    losses = train(model, optimizer, 40)
    assert losses[-1] < 0.1 < 2 < losses[0]
    model, optimizer = new()
    train(model, optimizer, 5)
    again, other = new()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 5, start=5)
    train(again, other, 5, start=5)
    assert torch.equal(vector(model), vector(again))


def test_counts_of_steps_are_loaded_to_the_device():
    """Checkpoints are read to host memory, which the fused kernel of a GPU cannot read. Here meta stands for a GPU."""
    model, other = Residual(), Residual().to("meta")
    optimizer = muon(model.parameters(), model, lr=0.1, adamw_lr=0.1)
    train(model, optimizer, 1)
    again = muon(other.parameters(), other, lr=0.1, adamw_lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert {value.device.type for state in again.state.values() for value in state.values()} == {"meta"}


def test_which_parameters_are_matrices():
    model = Residual()
    inside = {id(p) for block in model.blocks() for p in block.parameters() if p.ndim == 2}
    assert len(inside) == 4
    for which, wanted in (("blocks", inside), ("all", inside | {id(model.head.weight)})):
        optimizer = muon(model.parameters(), model, lr=0.1, adamw_lr=0.2, matrices=which)
        by_muon, by_adam = optimizer.param_groups
        assert [by_muon["matrices"], by_adam["matrices"]] == [True, False]
        assert [by_muon["lr"], by_adam["lr"]] == [0.1, 0.2]
        assert {id(p) for p in by_muon["params"]} == wanted
        assert len(by_muon["params"]) + len(by_adam["params"]) == len(list(model.parameters()))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        held = sum(v.nbytes for state in optimizer.state.values() for k, v in state.items() if k != "step")
        sizes = [p.numel() for p in model.parameters()]
        plan = Plan(model, sum(sizes), sum(sizes), 1, 1, "", False, lambda component: component)
        cost = muon_cost({"matrices": which}, plan)
        assert held == cost.device_bytes == cost.checkpoint_bytes
        # Products of 16 x 32 matrices: 2 * 16 * 16 * 32 twice and 2 * 16**3 once; the head is of 11 x 16.
        work = 5 * (4 * (4 * 16**2 * 32 + 2 * 16**3) + (which == "all") * (4 * 11**2 * 16 + 2 * 11**3))
        assert cost.lines[0].startswith(f"{work / 1e12:.3g} TFLOP per step for {len(wanted)} matrices")
        assert "divided" not in cost.lines[0]
        assert (cost.update_flops, cost.update_bytes) == (work, 0)
        cost = muon_cost({"matrices": which}, dataclasses.replace(plan, replicas=2, shards=3))
        assert cost.lines[0].endswith(", divided over 6 devices, which exchange 0.0 MB in bf16")
        values = sum(p.numel() for p in model.parameters() if id(p) in wanted)
        gathered = 4 * values * 2 / 3  # momentum of the two other shards, in 32 bits
        assert cost.update_flops == pytest.approx(work / 6)
        assert cost.update_bytes == pytest.approx(gathered + 2 * (5 / 6) * 2 * values)


def test_a_parameter_without_gradient_stays():
    model = Residual()
    optimizer = muon(model.parameters(), model, lr=0.1, adamw_lr=0.1)
    loss_of(model, 0).backward()
    still = [model.embed.weight, model.layers[0].branch[1].weight]
    for p in still:
        p.grad = None
    before = [p.detach().clone() for p in still]
    optimizer.step()
    assert all(map(torch.equal, before, still)) and not any(optimizer.state[p] for p in still)


def test_it_has_all_settings_of_the_recipe():
    wanted = {"momentum": 0.8, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3}
    for group in muon(Residual().parameters(), Residual(), lr=0.1, adamw_lr=0.2, **wanted).param_groups:
        assert all(group[name] == value for name, value in wanted.items())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lr": -1.0}, "muon: lr, eps and weight_decay must not be negative, got -1.0"),
        ({"momentum": 1.0}, r"muon: momentum must lie in \[0, 1\), got 1.0"),
        ({"betas": (0.9, 1.0)}, r"muon: betas.1 must lie in \[0, 1\), got 1.0"),
    ],
)
def test_numbers_that_cannot_be(settings, line):
    with pytest.raises(ValueError, match=line):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], **{"lr": 0.1} | settings)


def test_parameters_that_cannot_be():
    with pytest.raises(ValueError, match=r"muon: a parameter of shape \(3,\) is no matrix; leave it to AdamW"):
        Muon([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"muon: a parameter of shape \(3, 2\) is torch.float16; keep parameters"):
        Muon([torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float16))], lr=0.1)


@pytest.mark.parametrize("check", muon_ranks.CHECKS)
def test_two_ranks(two_ranks, check):
    two_ranks(check)
