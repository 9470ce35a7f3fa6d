"""Run on four ranks by powersgd_shards_ranks.py: PowerSGD's compressor and its wire, step by step."""

from unittest import mock

import torch
import torch.distributed as dist

from recipes.algorithms.powersgd import low_rank
from recipes.algorithms.powersgd.all_reduce import all_reduce_sum
from recipes.algorithms.powersgd.low_rank import LowRank, agree, reduce_others
from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9

# Wide, tall, square, a convolution's, and one that has a single row.
SHAPES = [torch.Size(s) for s in ((6, 20), (18, 5), (7, 7), (8, 3, 3, 3), (1, 9))]
INF, NAN = float("inf"), float("nan")


def gradients(seed, rank=None, shapes=SHAPES):
    """The gradients of a rank (by default, this one) in a step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def mean(seed, ranks=4, shapes=SHAPES):
    parts = [gradients(seed, rank, shapes) for rank in range(ranks)]
    return [torch.stack(same).double().mean(0) for same in zip(*parts, strict=True)]


def step(compressor, state, given, group=None, others=(), shards=None, factor=None):
    """Average one block, as the lever does."""
    group = group or dist.group.WORLD
    machines = dist.get_world_size(group)
    block = compressor.compress(given, machines, state, group)
    reduce_others(list(others), machines, group)
    agreed = agree([block], list(others), group, shards)
    compressor.finish(block, agreed.sent[0], state, machines, factor)
    return agreed


def new(rank, shapes=SHAPES, dtype=torch.float32, **arguments):
    compressor = LowRank(rank, **arguments)
    return compressor, compressor.new_state(shapes, torch.device("cpu"), 0, dtype)


def same_everywhere(tensors):
    for tensor in tensors:
        first = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


def decoded(compressor, state):
    return [compressor.buffer.decode(e) for e in state.errors]


def as_matrix(gradient):
    matrix = gradient.flatten(1)
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


# --- the wire --------------------------------------------------------------------------------------------------------


def check_wire():
    world, rank = dist.group.WORLD, dist.get_rank()
    for count in (1, 4, 7, 64):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(10 * count + r)) for r in range(4)]
        for scale in (1.0, 2.0**-20):
            total, finite = all_reduce_sum(parts[rank], world, MEAN_1_6_9, scale)
            rounded = [MEAN_1_6_9.decode(MEAN_1_6_9.encode(part * scale)) for part in parts]
            wanted = MEAN_1_6_9.decode(MEAN_1_6_9.encode(torch.stack(rounded).sum(0))) / scale
            assert torch.equal(total, wanted) and finite
            same_everywhere([total])
        total, _ = all_reduce_sum(parts[rank], world, FLOAT_32)
        torch.testing.assert_close(total, torch.stack(parts).sum(0), rtol=1e-6, atol=1e-6)

    values = torch.tensor([INF, -INF, NAN, 1.0] if rank == 1 else [0.0, 0.0, 2.0, 1.0])
    for wire in (MEAN_1_6_9, FLOAT_32):
        total, finite = all_reduce_sum(values.clone(), world, wire)
        assert bool(finite) == (rank != 1)
        largest = wire.largest if wire is MEAN_1_6_9 else wire.largest / 4
        assert total.tolist() == [largest, -largest, 6.0, 4.0]
    total, finite = all_reduce_sum(torch.full((3,), 15.0), world, MEAN_1_6_9)  # a finite sum out of range
    assert finite and total.tolist() == [MEAN_1_6_9.largest] * 3


# --- what is averaged ------------------------------------------------------------------------------------------------


def check_full_rank():
    for buffer in (FLOAT_32, MEAN_1_6_9):
        compressor, state = new(100, wire=FLOAT_32, buffer=buffer)
        for seed in range(3):
            given, others = gradients(seed), gradients(seed, shapes=[torch.Size((5,)), torch.Size((3, 2))])
            agreed = step(compressor, state, given, others=others)
            wanted = mean(seed) + mean(seed, shapes=[torch.Size((5,)), torch.Size((3, 2))])
            # In the 1-6-9 buffer each machine's deviation from the mean is rounded by up to 2^-10 of itself, and the
            # four roundings do not cancel as the deviations do.
            tolerance = 1e-6 if buffer is FLOAT_32 or seed == 0 else 4 * 2**-10
            for found, exact in zip(given + others, wanted, strict=True):
                assert (found - exact).abs().max() < tolerance  # of gradients around 1
            norm = torch.stack([g.square().sum() for g in wanted]).sum().sqrt()
            assert abs(agreed.norm / norm - 1) < tolerance
            same_everywhere(given + others + [agreed.norm])
    # Gradients in 64 bits are averaged in 64 bits, and sent so, unless the wire has 16.
    for wire, tolerance in ((FLOAT_32, 1e-13), (MEAN_1_6_9, 2 * 2**-10)):
        for cholesky in (False, True):
            compressor, state = new(100, dtype=torch.float64, wire=wire, buffer=wire, cholesky=cholesky)
            given = [g.double() for g in gradients(0)]
            block = compressor.compress(given, 4, state, dist.group.WORLD)
            assert block.orthonormal
            compressor.finish(block, agree([block], [], dist.group.WORLD).sent[0], state, 4)
            sums = compressor.summed_errors(state, dist.group.WORLD)
            compressor.load_errors(state, sums, 4)
            for found, exact, error in zip(given, mean(0), decoded(compressor, state), strict=True):
                assert found.dtype == torch.float64 and (found - exact).norm() / exact.norm() < tolerance
                assert wire is MEAN_1_6_9 or error.dtype == torch.float64
    # The same on the 16-bit wire: two roundings of 2^-10 each for P, of which only the span matters, and for Q'.
    compressor, state = new(100)
    given = gradients(0)
    step(compressor, state, given)
    for found, exact in zip(given, mean(0), strict=True):
        assert 1e-5 < (found - exact).norm() / exact.norm() < 2 * 2**-10


def check_memory_orders():
    """channels_last gradients are written where they lie, and come out as the others do."""
    compressor, state = new(3, wire=FLOAT_32)
    _, again = new(3, wire=FLOAT_32)
    plain, turned = gradients(0), gradients(0)
    turned[3] = turned[3].contiguous(memory_format=torch.channels_last)
    place = turned[3].data_ptr()
    step(compressor, state, plain)
    step(compressor, again, turned)
    assert all(torch.equal(a, b) for a, b in zip(plain, turned, strict=True))
    assert turned[3].data_ptr() == place and turned[3].is_contiguous(memory_format=torch.channels_last)


def check_what_lay_on_the_wire():
    """The largest sums are told as they were sent, so that a user sees how far from being clamped they are."""
    compressor, state = new(3, wire=FLOAT_32, p_scale=0.5, q_scale=4.0)
    block = compressor.compress(gradients(0), 4, state, dist.group.WORLD)
    exact = [as_matrix(g).float() for g in mean(0)]
    p = max((e @ q).abs().max() for e, q in zip(exact, state.projections, strict=True))
    q = max((e.T @ basis).abs().max() for e, basis in zip(exact, block.bases, strict=True))
    torch.testing.assert_close(block.largest, torch.stack([0.5 * p, 4.0 * q]), rtol=1e-5, atol=0)
    compressor, state = new(3, p_scale=1e6)
    block = compressor.compress(gradients(0), 4, state, dist.group.WORLD)
    assert block.largest[0] == MEAN_1_6_9.largest > block.largest[1] > 0


def check_cholesky_factors():
    """Another basis of the same columns gives the same average, and a block that has none is done by reflections."""
    found = []
    for cholesky in (False, True):
        compressor, state = new(3, wire=FLOAT_32, cholesky=cholesky)
        given = gradients(0)
        block = compressor.compress(given, 4, state, dist.group.WORLD)
        assert block.orthonormal and compressor.repair([block], [state], dist.group.WORLD) == []
        same_everywhere(block.bases)
        compressor.finish(block, agree([block], [], dist.group.WORLD).sent[0], state, 4)
        found.append(given)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)  # some 32-bit roundings of values of order 1

    compressor, state = new(3, wire=FLOAT_32, cholesky=True, identity=0.0)
    nothing = [torch.zeros(shape) for shape in SHAPES]
    blocks = [compressor.compress(given, 4, state, dist.group.WORLD) for given in (gradients(0), nothing, gradients(0))]
    assert [bool(block.orthonormal) for block in blocks] == [True, False, True]
    assert compressor.repair(blocks, [state] * 3, dist.group.WORLD) == [1]
    same_everywhere(blocks[1].bases)
    for basis, q in zip(blocks[1].bases, blocks[1].factors, strict=True):
        assert (basis.T @ basis - torch.eye(basis.shape[1])).abs().max() < 1e-6 and not q.any()
    assert agree(blocks, [], dist.group.WORLD).sent.all()
    if dist.get_rank() == 0:  # even if this rank alone rounds differently, all of them do it again
        blocks[2].orthonormal = torch.zeros(())
    assert compressor.repair(blocks, [state] * 3, dist.group.WORLD) == [2]


def check_low_rank_feedback():
    """What has been sent and what is left over are, together, all gradients there were; so nothing is ever lost.

    A 1-6-9 buffer loses up to 2^-10 of the errors, which are around 1 here, at each of 8 steps on each of 4 machines.
    """
    for buffer, tolerance in ((FLOAT_32, 1e-5), (MEAN_1_6_9, 8 * 4 * 2**-10)):
        compressor, state = new(2, wire=FLOAT_32, buffer=buffer)
        sent = [torch.zeros(shape) for shape in SHAPES]
        wanted = [torch.zeros(shape).double() for shape in SHAPES]
        for seed in range(8):
            given = gradients(seed)
            step(compressor, state, given)
            for total, part, exact, part_exact in zip(sent, given, wanted, mean(seed), strict=True):
                total += part
                exact += part_exact
        left = compressor.summed_errors(state, dist.group.WORLD)
        for total, rest, exact in zip(sent, left, wanted, strict=True):
            assert (as_matrix(total) + rest - as_matrix(exact)).abs().max() < tolerance
        assert (as_matrix(wanted[0]) - as_matrix(sent[0])).abs().max() > 0.1  # rank 2 did leave something over
        assert state.errors[0].dtype == buffer.dtype and state.errors[1].shape == (5, 18)  # step 9


def check_feedback_closes_the_gap():
    """The mean of what is sent goes to the mean of the gradients; without errors it does not.

    The gradients must vary: an error has no part in Q's directions (E Q = P before it was taken off), so with one and
    the same gradient P would span the same columns for ever, and the rest would never be sent.
    """
    steps, gaps = 60, {}
    for feedback in (True, False):
        compressor, state = new(2, SHAPES[:1], wire=FLOAT_32)
        total, exact = torch.zeros(SHAPES[0]), torch.zeros(SHAPES[0])
        for seed in range(steps):
            given = [gradients(0, rank=7)[0] + g for g in gradients(seed, shapes=SHAPES[:1])]
            exact += gradients(0, rank=7)[0] + mean(seed, shapes=SHAPES[:1])[0]
            if not feedback:
                _, state = new(2, SHAPES[:1], wire=FLOAT_32)
            step(compressor, state, given)
            total += given[0]
        gaps[feedback] = ((total - exact).norm() / exact.norm()).item()
    assert gaps[True] < 0.25 * gaps[False], gaps


def check_replicas():
    """A model trained with it is the same on every rank to the last bit, at any rank of the compression."""
    for rank in (1, 2, 100):
        torch.manual_seed(0)
        weight, wanted = torch.randn(6, 20), torch.randn(6, 20)
        compressor, state = new(rank, [weight.shape])
        start = (weight - wanted).norm()
        for seed in range(100):
            noise = gradients(seed, shapes=[weight.shape])[0]
            gradient = (weight - wanted) + noise
            step(compressor, state, [gradient])
            weight -= 0.05 * gradient
        same_everywhere([weight, state.projections[0]])
        assert (weight - wanted).norm() < 0.2 * start, rank


# --- what is not finite ----------------------------------------------------------------------------------------------


def check_nonfinite_gradient():
    for bad in (INF, -INF, NAN):
        compressor, state = new(2)
        step(compressor, state, gradients(0))
        before = decoded(compressor, state)
        given = gradients(1)
        if dist.get_rank() == 2:
            given[1][3, 2] = bad
        agreed = step(compressor, state, given)
        assert agreed.norm == INF and agreed.sent.all()  # P and Q' were finite: their step happened
        assert all(torch.isfinite(e).all() for e in decoded(compressor, state))
        # The bad matrix took no part: the sum of what is left is that of the errors and the other three gradients.
        left = compressor.summed_errors(state, dist.group.WORLD)
        total = before[1].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        total += sum(as_matrix(gradients(1, rank)[1]) for rank in (0, 1, 3)) / 4
        assert (left[1] + as_matrix(given[1]) - total).abs().max() < 5e-3 * total.abs().max()
        same_everywhere(given)
        assert torch.isfinite(step(compressor, state, gradients(2)).norm)  # and the next step is an ordinary one


def broken_wire(call):
    """The wire, with an infinity put into what rank 1 sends at one of its calls: P at 0, Q' at 1."""
    calls = []

    def send(values, group, wire, scale):
        calls.append(1)
        if len(calls) - 1 == call and dist.get_rank() == 1:
            values = values.clone()
            values[0] = INF
        return all_reduce_sum(values, group, wire, scale)

    return mock.patch.object(low_rank, "all_reduce_sum", send)


def check_nonfinite_p_and_q():
    for wire in (MEAN_1_6_9, FLOAT_32):
        for call in (0, 1):
            compressor, state = new(2, wire=wire)
            step(compressor, state, gradients(0))
            before = decoded(compressor, state)
            given = gradients(1)
            with broken_wire(call):
                agreed = step(compressor, state, given)
            assert agreed.norm == INF and not agreed.sent.any()
            # Kept whole, on every rank: the error and this step's gradient.
            for error, old, gradient in zip(decoded(compressor, state), before, gradients(1), strict=True):
                wanted = old + as_matrix(gradient) / 4
                assert torch.equal(error, MEAN_1_6_9.decode(MEAN_1_6_9.encode(wanted)))
            same_everywhere([torch.nan_to_num(g) for g in given])
            assert torch.isfinite(step(compressor, state, gradients(2)).norm)


def check_overflow_of_finite_gradients():
    """Gradients so large that E Q overflows: finite themselves, and the flag is P's."""
    compressor, state = new(2)
    given = gradients(0)
    if dist.get_rank() == 3:
        given[0].fill_(3e38)
    block = compressor.compress(given, 4, state, dist.group.WORLD)
    assert block.finite[0] and bool(block.finite[1]) == (dist.get_rank() != 3)
    agreed = agree([block], [], dist.group.WORLD)
    compressor.finish(block, agreed.sent[0], state, 4)
    assert agreed.norm == INF and not agreed.sent.any()
    kept = decoded(compressor, state)
    assert (kept[0] == 0).all() == (dist.get_rank() == 3)  # 1-6-9 cannot hold 1e38: zeroed there, kept elsewhere
    assert all((error != 0).any() for error in kept[1:])


def check_nonfinite_error():
    compressor, state = new(2, buffer=FLOAT_32)
    step(compressor, state, gradients(0))
    before = [e.clone() for e in state.errors]
    if dist.get_rank() == 0:
        state.errors[2][0, 0] = NAN
    agreed = step(compressor, state, gradients(1))
    assert agreed.norm == INF and not agreed.sent.any()
    for number, (error, old, gradient) in enumerate(zip(state.errors, before, gradients(1), strict=True)):
        wanted = old + as_matrix(gradient) / 4
        assert torch.equal(error, torch.zeros_like(wanted) if (dist.get_rank(), number) == (0, 2) else wanted)
    assert torch.isfinite(step(compressor, state, gradients(2)).norm)


def check_nonfinite_others():
    for bad in (INF, NAN):
        compressor, state = new(2)
        others = [torch.full((3,), bad if dist.get_rank() == 1 else 1.0)]
        agreed = step(compressor, state, gradients(0), others=others)
        assert agreed.norm == INF and agreed.sent.all()


# --- shards and checkpoints ------------------------------------------------------------------------------------------


def check_shards(machine, ordinals):
    """Two machines of two shards: ranks 0, 1 and 2, 3; each averages with the rank of its own ordinal."""
    rank, ordinal = dist.get_rank(), dist.get_rank() % 2
    compressor, state = new(100, wire=FLOAT_32)
    given = gradients(0)
    agreed = step(compressor, state, given, group=ordinals, shards=machine)
    halves = [[gradients(0, r) for r in (o, o + 2)] for o in (0, 1)]
    squared = 0.0
    for number, (a, b) in enumerate(halves):
        wanted = [(x.double() + y) / 2 for x, y in zip(a, b, strict=True)]
        squared += sum(w.square().sum() for w in wanted)
        if number == ordinal:
            assert all((g - w).abs().max() < 1e-6 for g, w in zip(given, wanted, strict=True))
    assert abs(agreed.norm / squared.sqrt() - 1) < 1e-6
    same_everywhere([agreed.norm])
    given = gradients(1)
    if rank == 3:
        given[0][0, 0] = INF
    assert step(compressor, state, given, group=ordinals, shards=machine).norm == INF  # on all four


def check_checkpoints(pair):
    """The errors of four machines, taken over by two: the next step sends what it would have sent."""
    compressor, state = new(2, wire=FLOAT_32, buffer=FLOAT_32)
    for seed in range(3):
        step(compressor, state, gradients(seed))
    sums = compressor.summed_errors(state, dist.group.WORLD)
    same_everywhere(sums)
    given = gradients(9)
    step(compressor, state, given)
    fewer, other = new(2, wire=FLOAT_32, buffer=FLOAT_32)
    fewer.load_errors(other, sums, 2)
    first = dist.get_rank() % 2 * 2  # of the ranks whose gradients this one stands for
    both = [(a + b) / 2 for a, b in zip(gradients(9, first), gradients(9, first + 1), strict=True)]
    step(fewer, other, both, group=pair)
    for a, b in zip(given, both, strict=True):
        assert (a - b).abs().max() < 1e-5
    for a, b in zip(compressor.summed_errors(state, dist.group.WORLD), fewer.summed_errors(other, pair), strict=True):
        assert (a - b).abs().max() < 1e-5
    try:
        fewer.load_errors(other, [*sums[1:], sums[0]], 2)
    except ValueError as error:
        assert "an error in the checkpoint has shape" in str(error)
    else:
        raise AssertionError("errors of other shapes were taken")


def check_compressor() -> None:
    """Everything above, on the four ranks of the process group."""
    rank = dist.get_rank()
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    machine = pairs[(0, 1) if rank < 2 else (2, 3)]
    ordinals = pairs[(0, 2) if rank % 2 == 0 else (1, 3)]
    check_wire()
    check_full_rank()
    check_memory_orders()
    check_low_rank_feedback()
    check_feedback_closes_the_gap()
    check_what_lay_on_the_wire()
    check_cholesky_factors()
    check_replicas()
    check_nonfinite_gradient()
    check_nonfinite_p_and_q()
    check_overflow_of_finite_gradients()
    check_nonfinite_error()
    check_nonfinite_others()
    check_shards(machine, ordinals)
    check_checkpoints(machine)
