"""The divided loss on one device, in the number formats of training; tensor_ranks.py has it in 64 bits on several."""

import pytest
import torch
import torch.distributed as dist

from recipes.algorithms.tensor_parallel import vocabulary
from recipes.algorithms.tensor_parallel.vocabulary import divided_token_losses
from recipes.models.autoregressive.loss import token_losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_exact_as_the_whole_loss(one_rank, monkeypatch, dtype):
    """Losses have 32 bits, and the gradient of the weight is summed over chunks in 32 bits."""
    monkeypatch.setattr(vocabulary, "CHUNK", 2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 16, generator=generator).to(dtype)
    weight = torch.randn(7, 16, generator=generator).to(dtype)
    targets = torch.randint(-1, 7, (256,), generator=generator)

    def gradients(losses_of, dtype):
        factors = [factor.to(dtype, copy=True).requires_grad_() for factor in (hidden, weight)]
        losses = losses_of(*factors)
        losses.sum().backward()
        return losses, *(factor.grad for factor in factors)

    exact = gradients(lambda h, w: token_losses(h, w, targets), torch.float64)
    whole = gradients(lambda h, w: token_losses(h, w, targets, chunk=2), dtype)
    found = gradients(lambda h, w: divided_token_losses(h, w, targets, 0, dist.group.WORLD), dtype)
    assert [t.dtype for t in found] == [t.dtype for t in whole] == [torch.float32, dtype, dtype]
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-5, atol=1e-5)
    for one, other, wanted in zip(found[1:], whole[1:], exact[1:], strict=True):
        assert (one - wanted).norm() < 1.1 * (other - wanted).norm()
