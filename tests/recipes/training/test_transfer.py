"""Copies of small tables between host and device."""

import pytest
import torch

from recipes.training.transfer import HostCopy, sent

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_arrive(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    numbers = sent([0.1, -2.0, 2.0**40], torch.float64, torch.device(device))
    copy = HostCopy(numbers)
    numbers.zero_()
    assert copy.tolist() == [0.1, -2.0, 2.0**40]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_host_does_not_wait_for_what_it_launches_later():
    copy = HostCopy(torch.tensor([1.0, 2.0], device="cuda"))
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
    done.record()
    assert copy.tolist() == [1.0, 2.0]
    assert not done.query()
