from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.engines.precision import autocast


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        return x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_attention_is_recomputed_by_the_kernel_of_the_first_pass(precision):
    """The backward pass runs outside of the context in which the first pass chose the kernel."""
    gradients = []
    for change in (lambda modules: None, recompute):
        torch.manual_seed(0)
        block, x = SelfAttention(), torch.randn(2, 5, 16)
        change([block])
        with autocast(torch.device("cpu"), precision):
            loss = block(x).square().mean()
        loss.backward()
        gradients.append(block.project.weight.grad)
    assert torch.equal(*gradients)


class Centred(nn.Linear):
    """Subtracts a moving mean, which each call in training replaces by another tensor."""

    def __init__(self, width):
        super().__init__(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.mean = torch.lerp(self.mean, x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


def with_a_forward_of_its_own():
    layer = nn.Bilinear(8, 8, 8)
    layer.forward = partial(layer.forward, torch.ones(4, 8))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        lambda: Centred(8),
        with_a_forward_of_its_own,
    ],
)
def test_a_block_with_a_state_trains_as_without_recomputation(make):
    """Statistics of norms were counted twice, and power iterations gave gradients of another weight."""
    states = []
    for change in (lambda modules: None, recompute):
        torch.manual_seed(0)
        block = make()
        change([block, block])  # a model may name one twice
        for _ in range(2):
            x = torch.randn(4, 8, requires_grad=True)
            y = block(x)
            (block(y) * y).sum().backward()  # called twice before the backward pass
            states.append([x.grad, *(p.grad.clone() for p in block.parameters()), *map(torch.clone, block.buffers())])
    for plain, again in zip(states[:2], states[2:], strict=True):
        for expected, found in zip(plain, again, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
