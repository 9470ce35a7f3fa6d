"""PowerSGD's compressor: shapes, seeds and bytes. Steps on four ranks are checked by powersgd_shards_ranks.py."""

import pytest
import torch
import torch.distributed as dist

from recipes.algorithms.powersgd.low_rank import LowRank, agree
from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9

CPU = torch.device("cpu")


def test_q_depends_on_seed_and_block_and_on_nothing_else():
    shapes = [torch.Size((6, 20)), torch.Size((20, 6))]
    first = LowRank(3).new_state(shapes, CPU, 0)
    torch.manual_seed(9)
    again = LowRank(3, wire=FLOAT_32).new_state(shapes, CPU, 0)
    assert all(torch.equal(a, b) for a, b in zip(first.projections, again.projections, strict=True))
    assert not torch.equal(first.projections[0], first.projections[1])
    others = LowRank(3).new_state(shapes, CPU, 1), LowRank(3, seed=1).new_state(shapes, CPU, 0)
    for one, other in ((first, others[0]), (first, others[1]), others):
        assert not torch.equal(one.projections[0], other.projections[0])


def test_q_is_gaussian():
    (q,) = LowRank(100).new_state([torch.Size((100, 300))], CPU, 0).projections
    # Of 30,000 numbers, the mean, the standard deviation and the kurtosis vary by 0.006, 0.004 and 0.03.
    assert q.mean().abs() < 0.03 and (q.std() - 1).abs() < 0.02 and (q**4).mean() == pytest.approx(3, abs=0.15)


def test_no_gradient_at_all_has_a_basis_too(one_rank):
    """By Cholesky factors, which zeros do not have: step 3 adds a small identity to P."""
    compressor = LowRank(3, wire=FLOAT_32, cholesky=True)
    shapes = [torch.Size((6, 20)), torch.Size((9, 5))]
    state = compressor.new_state(shapes, CPU, 0)
    block = compressor.compress([torch.zeros(shape) for shape in shapes], 1, state, dist.group.WORLD)
    assert block.orthonormal and not any(q.any() for q in block.factors)


def test_values_that_several_devices_hold_count_once_in_the_norm(one_rank):
    """Each of `copies` devices adds its share of them."""
    compressor, shapes = LowRank(6, wire=FLOAT_32), [torch.Size((6, 20))]
    gradient = torch.randn(shapes[0], generator=torch.Generator().manual_seed(0))
    others, squared = [torch.full((3,), 2.0), torch.full((5,), 3.0)], gradient.square().sum().item()
    for copies, rest in ((None, 12 + 45), ([4, 1], 12 / 4 + 45)):
        state = compressor.new_state(shapes, CPU, 0)
        block = compressor.compress([gradient.clone()], 1, state, dist.group.WORLD)
        norm = agree([block], others, dist.group.WORLD, None, copies).norm
        assert norm.item() == pytest.approx((squared + rest) ** 0.5, rel=1e-6)


def test_a_state_lies_with_the_lesser_side_first():
    state = LowRank(4).new_state([torch.Size((6, 20)), torch.Size((20, 6)), torch.Size((3, 5, 2, 2))], CPU, 0)
    assert [tuple(q.shape) for q in state.projections] == [(20, 4), (20, 4), (20, 3)]
    assert [tuple(e.shape) for e in state.errors] == [(6, 20), (6, 20), (3, 20)]
    assert {e.dtype for e in state.errors} == {torch.int16}


@pytest.mark.parametrize(("width", "rank", "saved"), [(1920, 512, 0.83), (2688, 640, 0.85), (3968, 896, 0.86)])
def test_bytes_are_those_of_the_published_table(width, rank, saved):
    """A layer's shards on each of m = 8 GPUs: all but the second MLP matrix are cut along the second axis."""
    m = 8
    shards = [(width, width // m)] * 4 + [(width, 4 * width // m), (4 * width // m, width)]
    shapes = [torch.Size(shape) for shape in shards]
    # As (rows, columns) the first MLP matrix is width x width / 2; rank r / m.
    sent = LowRank(rank // m).bytes_sent(shapes, machines=2)
    plain = sum(2 * (1 / 2) * 2 * shape.numel() for shape in shapes)  # two bytes a value, two machines
    assert abs(1 - sent / plain - (1 - 5 * rank / (8 * width))) < 1e-9
    assert round(1 - sent / plain, 2) == saved
    assert LowRank(rank // m, wire=FLOAT_32).bytes_sent(shapes, machines=2) == 2 * sent
    # P and Q' are sent once, and Q, as large as Q', is kept: two bytes of each number on the wire, four in memory.
    kept = sum(q.nbytes for q in LowRank(rank // m).new_state(shapes, CPU, 0).projections)
    assert LowRank(rank // m).factor_bytes(shapes) == 2 * sent + kept


def test_16_bit_errors_take_two_bytes():
    (error,) = LowRank(2, buffer=MEAN_1_6_9).new_state([torch.Size((10, 10))], CPU, 0).errors
    assert error.nbytes == 200
