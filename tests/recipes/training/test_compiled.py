"""Compiled functions with their own gradients have these gradients."""

import pytest
import torch
from torch.autograd import Function

from recipes.training.compiled import result


def unchanged(x):
    return x.clone().contiguous()


def converted(x):
    return (2 * x).to(x.dtype)


def changed_in_place(x):
    return x.clone().mul_(2)


def written(x):
    return torch.mul(x, 2, out=torch.empty_like(x))


@pytest.mark.parametrize("made", [unchanged, converted, changed_in_place, written])
def test_a_result_of_its_own_has_its_gradient(made):
    class Doubled(Function):
        @staticmethod
        def forward(ctx, x):
            return result(made(x))

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.randn(3, 4, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: Doubled.apply(x * 1), backend="eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 2.0))
