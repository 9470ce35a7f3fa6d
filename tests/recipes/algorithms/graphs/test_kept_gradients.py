"""Gradients of several microbatches of CUDA graphs."""

import copy

import pytest
import torch
from torch import nn

from recipes.algorithms.graphs.kept_gradients import KeptGradients


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_gradients_are_summed_in_memory_of_their_own(microbatches):
    """What a microbatch leaves in `grad` changes when the next one begins."""
    net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    other = copy.deepcopy(net)
    kept = KeptGradients(net.parameters())
    x = torch.randn(4, 6)
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        for _ in range(microbatches):
            of_graphs = [p.grad for p in net.parameters()]
            kept.before_forward()
            for left in of_graphs:
                if left is not None and all(left is not copy for copy in kept.copies.values()):
                    left.fill_(torch.nan)
            net(x).square().mean().backward()
    assert len(kept.copies) == (0 if microbatches == 1 else 4)
    other(x).square().mean().backward()
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, microbatches * two.grad, rtol=1e-5, atol=1e-7)
