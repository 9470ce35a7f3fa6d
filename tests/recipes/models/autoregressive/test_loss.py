"""The chunked cross-entropy: equal to the plain one, in 32-bit, and never with all logits at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.models.autoregressive.loss import token_losses, wide_product


def problem(rows=23, width=6, tokens=17, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, requires_grad=True)
    weight = torch.randn(tokens, width, generator=generator, requires_grad=True)
    targets = torch.randint(-1, tokens, (rows,), generator=generator)
    return hidden, weight, targets, torch.rand(rows, generator=generator)


def plain(hidden, weight, targets):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, targets, ignore_index=-1, reduction="none")


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 9))
@settings(max_examples=30)
def test_it_equals_the_unchunked_loss(rows, chunk, seed):
    hidden, weight, targets, share = problem(rows, seed=seed)
    own, expected = token_losses(hidden, weight, targets, chunk), plain(hidden, weight, targets)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=2e-6)  # other orders of 32-bit sums
    gradients = torch.autograd.grad((own * share).sum(), (hidden, weight))
    for one, other in zip(gradients, torch.autograd.grad((expected * share).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_in_64_bit_it_is_the_unchunked_loss_to_ten_digits():
    hidden, weight, targets, share = problem(50, 16, 33)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    own, expected = token_losses(hidden, weight, targets, 7), plain(hidden, weight, targets)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad((own * share).sum(), (hidden, weight))
    for one, other in zip(gradients, torch.autograd.grad((expected * share).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_gradients_of_16_bit_factors_are_rounded_a_few_times(dtype, error):
    """Half a unit in the last place is 2^-9 and 2^-12. The slope and each product are rounded once, the sum of 128 of
    them at the end only."""
    hidden, weight, targets, share = problem(512, 32, 40)
    hidden, weight = (x.detach().to(dtype) for x in (hidden, weight))
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    own = torch.autograd.grad((token_losses(*leaves, targets, 4) * share).sum(), leaves)
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad((plain(*leaves, targets) * share).sum(), leaves)
    for one, other in zip(own, exact, strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() < error * other.norm()


def test_gradients_by_finite_differences():
    hidden, weight, targets, _ = problem(5, 3, 4)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: token_losses(h, w, targets, 2), (hidden, weight))


def test_targets_that_are_not_there_change_nothing():
    hidden, weight, targets, _ = problem()
    losses = token_losses(hidden, weight, targets, 4)
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    assert (targets < 0).any()
    assert (losses[targets < 0] == 0).all() and (gradient[targets < 0] == 0).all()
    assert (losses[targets >= 0] > 0).all() and (gradient[targets >= 0] != 0).any(1).all()


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_the_logits_of_all_rows_are_never_there():
    hidden, weight, targets, _ = problem(rows=400, width=4, tokens=300)
    with Largest() as seen:
        token_losses(hidden, weight, targets, 50).sum().backward()
    assert seen.numel == 50 * 300


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_16_bit_factors_give_32_bit_logits(dtype, error):
    """Under autocast the factors are rounded, not the products: far nearer than 16-bit logits would be."""
    hidden, weight, targets, _ = problem(width=64)
    hidden = (hidden * 3).detach().requires_grad_()
    with torch.autocast("cpu", dtype):
        own = token_losses(hidden, weight, targets, 8)
    expected = plain(hidden.to(dtype).float(), weight.to(dtype).float(), targets)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", dtype):  # in which a backward pass may run, too
        own.sum().backward()
    leaves = [x.detach().to(dtype).double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(plain(*leaves, targets).sum(), leaves)
    for leaf, wanted in zip((hidden, weight), exact, strict=True):
        assert leaf.grad.dtype == torch.float32
        assert (leaf.grad - wanted).norm() < error * wanted.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bit_factors_are_exact_on_a_gpu(dtype):
    """Whatever the setting of TF32, which stays as it is: 16-bit numbers fit into it."""
    before = torch.backends.cuda.matmul.allow_tf32
    a, b = torch.randn(64, 128).to(dtype), torch.randn(128, 96).to(dtype)
    found = wide_product(a.cuda(), b.cuda())
    assert found.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 == before
    # 32-bit sums of 128 products of order 1
    torch.testing.assert_close(found.cpu().double(), a.double() @ b.double(), rtol=0, atol=5e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_as_on_the_cpu():
    hidden, weight, targets, _ = problem(rows=64, width=64, tokens=80)
    with torch.autocast("cuda", torch.bfloat16):
        own = token_losses(hidden.cuda(), weight.cuda(), targets.cuda(), 16)
    expected = plain(hidden.bfloat16().float(), weight.bfloat16().float(), targets)
    torch.testing.assert_close(own.cpu(), expected, rtol=1e-3, atol=1e-3)
