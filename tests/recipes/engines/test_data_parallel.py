"""Copies of a model, in a process group of one rank."""

import pytest
import torch
from torch import nn

from recipes.engines.data_parallel import data_parallel


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.used, self.unused = (nn.Linear(2, 2) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.used(self.frozen(x)).sum()


def test_parameters_without_gradients_are_named(one_rank):
    model = data_parallel(Halves(), averaged=False)
    model(torch.ones(1, 2)).backward()
    with pytest.raises(ValueError, match=r"^model: unused.weight, unused.bias had no gradient in the last batch"):
        model(torch.ones(1, 2))


def test_other_errors_are_as_they_are(one_rank):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        data_parallel(Halves(), averaged=False)(torch.ones(1, 3))


@pytest.mark.parametrize("averaged", [False, True])
def test_complex_buffers_are_named(one_rank, averaged):
    """Of gloo it was "Invalid scalar type"."""
    model = Halves()
    model.used.register_buffer("waves", torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"^model: used.waves is complex, and ranks on CPUs cannot exchange it; keep"):
        data_parallel(model, averaged)
