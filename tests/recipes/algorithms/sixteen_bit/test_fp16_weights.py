"""Weights and gradients in 16 bits against 32-bit ones of the same values."""

import pytest
import torch
from torch import nn

from recipes.algorithms.gradients.clipping import clip_by_norm
from recipes.algorithms.sixteen_bit.adam16 import Adam16
from recipes.algorithms.sixteen_bit.fp16_weights import factor_of, store

SCALE = 2.0**13


def pair(compiled=False):
    """Parameters of a matrix that is stored in 16 bits, a bias in 32, and the same in 32 bits; an Adam16 for each.

    All values and gradients fit into float16.
    """
    torch.manual_seed(0)
    matrix, bias = torch.randn(6, 4).half().float(), torch.randn(4)
    factor = torch.tensor(SCALE)
    kinds = []
    for low in (True, False):
        parameters = [nn.Parameter(matrix.clone()), nn.Parameter(bias.clone())]
        if low:
            store(parameters[:1], factor)
        groups = [{"params": [parameters[0]], "moment_bits": 16}, {"params": [parameters[1]], "moment_bits": 32}]
        kinds.append((parameters, Adam16(groups, lr=0.05, compiled=compiled)))
    return factor, kinds


def give_gradients(factor, kinds, seed, size=1e-3):
    generator = torch.Generator().manual_seed(seed)
    wide = [size * torch.randn(shape, generator=generator) for shape in ((6, 4), (4,))]
    low = (wide[0] * factor).half()
    (stored, plain) = (parameters for parameters, _ in kinds)
    stored[0].grad, stored[1].grad = low, wide[1].clone()
    plain[0].grad, plain[1].grad = low.float() / factor, wide[1].clone()


@pytest.mark.parametrize("largest", [1e9, 1e-3])
def test_steps_are_those_in_32_bit_rounded_to_16(largest):
    factor, kinds = pair()
    (stored, low), (plain, wide) = kinds
    for step in range(5):
        factor.fill_(SCALE)
        give_gradients(factor, kinds, seed=step)
        norms = [clip_by_norm(parameters, largest) for parameters in (stored, plain)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
        low.step()
        wide.step()
        with torch.no_grad():
            plain[0].copy_(plain[0].half())
        # Clipping divides in another order, which can round the moments and weights to the neighbouring number.
        torch.testing.assert_close(stored[0].float(), plain[0], rtol=2**-9, atol=1e-6)
        torch.testing.assert_close(stored[1], plain[1], rtol=1e-5, atol=1e-7)
    assert stored[0].dtype == stored[0].grad.dtype == torch.float16 and stored[1].dtype == torch.float32


def test_without_clipping_every_bit_is_the_same():
    factor, kinds = pair()
    (stored, low), (plain, wide) = kinds
    for step in range(4):
        give_gradients(factor, kinds, seed=step)
        low.step()
        wide.step()
        with torch.no_grad():
            plain[0].copy_(plain[0].half())
        assert torch.equal(stored[0].float(), plain[0]) and torch.equal(stored[1], plain[1])
    states = [optimizer.state[parameters[0]] for parameters, optimizer in kinds]
    assert all(torch.equal(states[0][name], states[1][name]) for name in ("mean", "variance"))


def test_gradients_that_16_bits_lose_without_their_factor():
    factor, kinds = pair()
    give_gradients(factor, kinds, seed=1, size=1e-9)
    stored, low = kinds[0]
    assert not (stored[0].grad.float() / factor).half().any()
    before = stored[0].detach().clone()
    low.step()
    assert low.state[stored[0]]["mean"].any() and not torch.equal(stored[0], before)


def test_matrices_that_share_a_factor_are_clipped_once():
    """As those of a block do."""
    factor, (*matrices, bias) = torch.tensor(SCALE), [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    store(matrices, factor)
    for matrix in matrices:
        matrix.grad = torch.full((2, 2), SCALE, dtype=torch.float16)
    bias.grad = torch.ones(2, 2)
    assert clip_by_norm([*matrices, bias], 0.5).item() == pytest.approx(12**0.5)
    clipped = [*(matrix.grad.float() / factor_of(matrix) for matrix in matrices), bias.grad]
    assert torch.stack(clipped).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_clipping_stored_gradients_alone():
    """As where only matrices of blocks are trained."""
    factor, matrix = torch.tensor(SCALE), nn.Parameter(torch.ones(2, 2))
    store([matrix], factor)
    matrix.grad = torch.full((2, 2), SCALE, dtype=torch.float16)
    assert clip_by_norm([matrix], 0.5).item() == pytest.approx(2)
    assert (matrix.grad.float() / factor_of(matrix)).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_clipping_a_skipped_update():
    factor, kinds = pair()
    assert clip_by_norm(kinds[0][0], 1.0) == 0 and factor == SCALE
    assert factor_of(kinds[0][0][0]) is factor and factor_of(kinds[1][0][0]) is None


def test_state_comes_back():
    factor, kinds = pair()
    stored, low = kinds[0]
    give_gradients(factor, kinds, seed=1)
    low.step()
    _, others = pair()
    parameters, other = others[0]
    other.load_state_dict(low.state_dict())
    for name in ("mean", "variance", "step"):
        assert torch.equal(other.state[parameters[0]][name], low.state[stored[0]][name])


def test_16_bit_parameters_of_others_are_refused():
    with pytest.raises(ValueError, match="adam16: a parameter of shape .* is torch.float16"):
        Adam16([nn.Parameter(torch.zeros(2, 2).half())], lr=0.1)
