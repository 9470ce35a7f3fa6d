"""The terms of the bound against closed forms, integrals and enumeration."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.models.dvae.loss import kl_to_uniform, logit_laplace, over_codes, relax


@pytest.mark.parametrize(("mean", "log_scale"), [(0.0, 0.0), (1.5, -1.0), (-2.0, 0.3), (0.7, -3.0)])
def test_the_density_of_pixels_integrates_to_1(mean, log_scale):
    """Over x in (0, 1), substituted by x = sigmoid(z): dx = x (1 - x) dz."""
    z = torch.linspace(mean - 60 * math.exp(log_scale), mean + 60 * math.exp(log_scale), 200_001, dtype=torch.float64)
    inside = z.abs() < 30  # beyond, x is 0 or 1 in 64-bit
    x = torch.sigmoid(z)
    density = torch.where(inside, logit_laplace(x, torch.tensor(mean), torch.tensor(log_scale)).exp() * x * (1 - x), 0)
    left_out = sum(math.exp(-abs(side * 30 - mean) / math.exp(log_scale)) / 2 for side in (-1, 1))
    assert torch.trapezoid(density, z).item() == pytest.approx(1 - left_out, abs=1e-5)


def test_the_density_integrates_to_1_over_x_itself():
    edges = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    middles = (edges[1:] + edges[:-1]) / 2
    assert logit_laplace(middles, torch.tensor(0.4), torch.tensor(-1.0)).exp().mean() == pytest.approx(1, abs=1e-4)


@given(st.floats(0.1, 0.9), st.floats(-4, 4), st.floats(-3, 3))
def test_the_density_is_its_formula(x, mean, log_scale):
    b = math.exp(log_scale)
    formula = 1 / (2 * b * x * (1 - x)) * math.exp(-abs(math.log(x / (1 - x)) - mean) / b)
    arguments = (torch.tensor(value, dtype=torch.float64) for value in (x, mean, log_scale))
    assert logit_laplace(*arguments).exp().item() == pytest.approx(formula, rel=1e-9, abs=1e-300)


def test_32_bit_is_enough_at_both_ends():
    x = torch.tensor([0.1, 0.9])
    exact = logit_laplace(x.double(), torch.tensor(2.0).double(), torch.tensor(-2.0).double())
    torch.testing.assert_close(
        logit_laplace(x, torch.tensor(2.0), torch.tensor(-2.0)).double(), exact, rtol=1e-5, atol=0
    )


def test_kl_by_enumeration():
    logits = torch.randn(2, 7, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    kl = kl_to_uniform(logits)
    assert kl.shape == (2, 3, 4)
    for b in range(2):
        for y in range(3):
            for x in range(4):
                weights = [math.exp(v) for v in logits[b, :, y, x].tolist()]
                q = [w / sum(weights) for w in weights]
                assert kl[b, y, x].item() == pytest.approx(sum(p * math.log(p / (1 / 7)) for p in q), rel=1e-9)


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
def test_either_memory_format_has_the_same_values(softmax):
    x = torch.randn(2, 7, 3, 4, generator=torch.Generator().manual_seed(0))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=memory_format)
        found = over_codes(softmax, given)
        torch.testing.assert_close(found, softmax(x, dim=1))
        assert found.stride() == given.stride()


def test_kl_at_its_ends():
    uniform = kl_to_uniform(torch.full((1, 8192, 1, 1), 3.0)).item()
    certain = torch.zeros(1, 8192, 1, 1)
    certain[0, 5] = 1e4
    assert uniform == pytest.approx(0, abs=1e-5) and kl_to_uniform(certain).item() == pytest.approx(math.log(8192))


LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0]).reshape(1, 4, 1, 1)


def draws(temperature, count=20_000):
    """(count, 4) samples of one place."""
    torch.manual_seed(4)
    samples = relax(LOGITS.expand(1, 4, 1, count), temperature)[0, :, 0].T
    torch.testing.assert_close(samples.sum(1), torch.ones(count))
    return samples


def test_cold_relaxation_is_a_one_hot_sample_of_the_softmax():
    cold = draws(0.01)
    # Two scores within a few hundredths of each other still mix: a few draws in a hundred.
    assert (cold.max(1).values > 0.99).float().mean() > 0.96
    share = cold.mean(0)
    expected = LOGITS.flatten().softmax(0)
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / len(cold)).sqrt()).all()  # 5 standard errors


def test_the_likeliest_is_a_sample_of_the_softmax_at_any_temperature():
    for temperature in (0.0625, 1.0, 30.0):
        counts = torch.bincount(draws(temperature).argmax(1), minlength=4) / 20_000
        expected = LOGITS.flatten().softmax(0)
        assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_hot_relaxation_is_uniform():
    assert (draws(1e4) - 0.25).abs().max() < 0.01


def test_gradients_of_the_relaxation_follow_its_formula():
    """For fixed noise z = softmax((l + g) / t), so dz_i / dl_j = z_i (1{i = j} - z_j) / t."""
    logits = LOGITS.clone().requires_grad_()
    torch.manual_seed(8)
    z = relax(logits, torch.tensor(0.7))
    (gradient,) = torch.autograd.grad(z[0, 2, 0, 0], logits)
    z = z.detach().flatten()
    expected = z[2] * (torch.eye(4)[2] - z) / 0.7
    torch.testing.assert_close(gradient.flatten(), expected, rtol=1e-4, atol=1e-6)


def test_the_relaxation_follows_the_seed():
    torch.manual_seed(1)
    one = relax(LOGITS, 0.5)
    torch.manual_seed(1)
    assert (relax(LOGITS, 0.5) == one).all() and (relax(LOGITS, 0.5) != one).any()


def test_a_generator_that_draws_the_ends(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor: tensor.fill_(1))
    z = relax(LOGITS, 1.0)  # all noise alike: the softmax itself
    torch.testing.assert_close(z, LOGITS.softmax(1), rtol=1e-4, atol=1e-5)

    def zero_at_the_second(tensor):
        tensor.fill_(0.5)[:, 1] = 0
        return tensor

    monkeypatch.setattr(torch.Tensor, "uniform_", zero_at_the_second)
    logits = LOGITS.clone().requires_grad_()
    z = relax(logits, 1.0)
    others = [k for k in range(LOGITS.shape[1]) if k != 1]
    assert (z[:, 1] == 0).all()
    torch.testing.assert_close(z[:, others], LOGITS[:, others].softmax(1), rtol=1e-4, atol=1e-5)
    z[:, 0].sum().backward()
    assert logits.grad.isfinite().all()
