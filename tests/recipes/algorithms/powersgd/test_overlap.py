"""Overlapped work: when it starts, in which order, and blocks without gradients."""

import threading

import pytest
import torch
from torch import nn

from recipes.algorithms.powersgd.overlap import Overlap

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def chain(device):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(device)


def backward(model, seed=0):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    model(x.to(model[0].weight.device)).square().mean().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_come_last_first_with_all_their_gradients(device):
    model, reference = chain(device), chain(device)
    order = []

    def work(number):
        order.append(number)
        return [p.grad.clone() for p in model[number].parameters()]

    overlap = Overlap([list(block.parameters()) for block in model], work)
    overlap.begin(passes=3)
    for seed in range(3):
        assert order == []  # gradients go on being accumulated
        backward(model, seed)
        backward(reference, seed)
    results = overlap.finish()
    assert order == [2, 1, 0]
    for found, block in zip(results, reference, strict=True):
        assert all(torch.equal(a, p.grad) for a, p in zip(found, block.parameters(), strict=True))
    backward(model)  # outside of a batch, as in a test of the memory
    with pytest.raises(AssertionError, match="more backward passes"):
        overlap.begin(passes=1)
        backward(model)
        backward(model)
    overlap.finish()


def test_a_block_without_gradients_is_worked_on_at_the_end():
    model = chain("cpu")
    model[1].requires_grad_(False)
    before, order = [], []
    blocks = [[p.requires_grad_() for p in block.parameters()] for block in model]
    overlap = Overlap(blocks, lambda number: order.append(number) or number, before.append)
    overlap.begin(passes=1)
    loss = model[2](model[0](torch.randn(2, 4))).mean()
    loss.backward()
    assert before == [2, 0]
    assert overlap.finish() == [0, 1, 2]
    assert order == [2, 0, 1] and before == [2, 0]


def test_the_backward_pass_does_not_wait_and_errors_arrive():
    model = chain("cpu")
    gate = threading.Event()

    def work(number):
        assert gate.wait(60)
        if number == 1:
            raise ValueError("no such matrix")
        return number

    overlap = Overlap([list(block.parameters()) for block in model], work)
    overlap.begin(passes=1)
    backward(model)  # ends, though no work has
    assert all(not result.done() for result in overlap.results)
    gate.set()
    with pytest.raises(ValueError, match="no such matrix"):
        overlap.finish()
