"""Counting on the device: as torch.bincount, which makes the host wait."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callbacks.counts import add_counts


@given(st.lists(st.lists(st.integers(0, 6), max_size=20), max_size=4))
def test_counts(batches):
    counts, expected = torch.zeros(7, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    for batch in batches:
        numbers = torch.tensor(batch, dtype=torch.int64)
        assert add_counts(counts, numbers) is counts
        expected += torch.bincount(numbers, minlength=7)
    assert torch.equal(counts, expected)


def test_weights_of_samples():
    numbers, weights = torch.tensor([[0, 1], [1, 2]]), torch.tensor([1.0, 0.25])
    found = add_counts(torch.zeros(4, dtype=torch.float64), numbers, weights)
    assert found.tolist() == [1, 1.25, 0.25, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_host_does_not_wait():
    numbers = torch.randint(8192, (64, 1024), device="cuda")
    counts = torch.zeros(8192, dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_counts(counts, numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(counts, torch.bincount(numbers.flatten(), minlength=8192))
