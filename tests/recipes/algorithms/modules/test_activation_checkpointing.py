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
