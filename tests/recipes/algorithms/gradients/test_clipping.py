"""Clipping by the whole gradient's norm; sharded gradients are clipped in fsdp_ranks.py."""


import pytest
import torch
from torch import nn

from recipes.algorithms.gradients.clipping import ClipByNorm, clip_by_norm
from tests.recipes.training.fake_run import FakeRun


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    return model


def test_the_norm_is_that_of_all_gradients():
    model = model_with_gradients()
    before = [p.grad.clone() for p in model.parameters()]
    norm = clip_by_norm(model.parameters(), 2.0)
    assert norm.item() == pytest.approx((6 * 1 + 3 * 4 + 3 * 9 + 1 * 16) ** 0.5)
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, old * 2 / norm, rtol=1e-5, atol=0)


def test_a_small_gradient_stays():
    model = model_with_gradients()
    before = [p.grad.clone() for p in model.parameters()]
    clip_by_norm(model.parameters(), 100.0)
    assert all(torch.equal(old, p.grad) for old, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("batch", "logged"), [(0, True), (1, False), (20, True)])
def test_the_norm_before_clipping_is_logged(batch, logged):
    run = FakeRun(model_with_gradients()).at(batch)
    ClipByNorm(1.0).clip_gradients(run)
    assert run.values("gradient/norm") == ({batch: pytest.approx(61**0.5)} if logged else {})
