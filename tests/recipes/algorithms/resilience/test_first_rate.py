"""The rate of the first batch after a start; runs that resume with another schedule are in test_equality.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipes.algorithms.resilience.first_rate import FirstRate
from recipes.training.clock import Clock


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(("batch", "rates"), [(7, [1.2, 3.0]), (0, [9.0, 9.0])])
def test_the_first_batch_has_the_rate_of_the_present_schedule(tensor, batch, rates):
    """Each group has its own peak. A rate that is a tensor stays the same one, which graphs and compiled steps read."""
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in rates], lr=9.0)
    held = [torch.tensor(9.0) if tensor else 9.0 for _ in rates]
    for group, peak, rate in zip(optimizer.param_groups, (0.2, 0.5), held, strict=True):
        group |= {"initial_lr": peak, "lr": rate}
    clock = Clock(batch, 4 * batch, 0, "10ba")
    FirstRate(lambda clock: float(clock.batch), 4).begin(SimpleNamespace(clock=clock, optimizer=optimizer))
    found = [group["lr"] for group in optimizer.param_groups]
    assert [float(rate) for rate in found] == pytest.approx(rates)
    assert not tensor or all(rate is before for rate, before in zip(found, held, strict=True))
