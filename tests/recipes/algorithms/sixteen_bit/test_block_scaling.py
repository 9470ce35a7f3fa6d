"""Gradient scales of residual blocks: the rule's properties, gradients against 32-bit, and what one scale loses."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.sixteen_bit.block_scaling import Enter, Leave, ScaledBranch, Scales, scale_branch, unscale
from tests.recipes.algorithms.residual import network

# --- the rule --------------------------------------------------------------------------------------------------------

# Runs of the same outcome for three blocks, long enough together to cross the window of 125 updates.
OUTCOMES = st.lists(
    st.tuples(st.tuples(st.booleans(), st.booleans(), st.booleans()), st.integers(1, 70)), max_size=5
).map(lambda runs: [finite for finite, length in runs for _ in range(length)])


def run_rule(outcomes, start=13.0):
    states = [Scales.new(3, start)]
    for finite in outcomes:
        states.append(states[-1].after(torch.tensor(finite)))
    return states


@given(outcomes=OUTCOMES, start=st.floats(7, 24))
@settings(max_examples=40)
def test_the_rule_moves_as_it_should(outcomes, start):
    states = run_rule(outcomes, start)
    last_cut = [None] * 3
    for number, (before, after, finite) in enumerate(zip(states[:-1], states[1:], outcomes, strict=True)):
        for block in range(3):
            old, new = before.exponents[block].item(), after.exponents[block].item()
            assert 7 <= new <= 24
            if finite[block]:
                assert new == min(old + 1 / 1000, 24)
            elif last_cut[block] is None or number - last_cut[block] >= 125:
                assert new == max(old - 0.5, 7)
                last_cut[block] = number
            else:  # within the window: it stands
                assert new == old


@given(outcomes=OUTCOMES)
@settings(max_examples=30)
def test_blocks_do_not_touch_each_other(outcomes):
    other = [[finite[0], not finite[1], True] for finite in outcomes]
    assert torch.equal(run_rule(outcomes)[-1].exponents[0], run_rule(other)[-1].exponents[0])


def test_the_rule_in_figures():
    scales = Scales.new(1)
    assert scales.values().item() == 2**13
    for _ in range(1000):
        scales = scales.after(torch.tensor([True]))
    assert scales.values().item() == pytest.approx(2**14, rel=1e-6)
    scales = scales.after(torch.tensor([False]))
    assert scales.values().item() == pytest.approx(2**13.5, rel=1e-6)
    low = high = Scales.new(1)
    for _ in range(125 * 14):
        low = low.after(torch.tensor([False]))
    for _ in range(12_000):
        high = high.after(torch.tensor([True]))
    assert (low.values().item(), high.values().item()) == (2**7, 2**24)


# --- the passes ------------------------------------------------------------------------------------------------------


def with_scales(model, scales):
    tensor = torch.as_tensor(scales, dtype=torch.float32)
    filtered = torch.zeros(len(model), dtype=torch.int64)
    for block, scale, count in zip(model, tensor, filtered, strict=True):
        scale_branch(block.branch, scale, count)
    return model, tensor, filtered


def batch(width=32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, width, generator=generator), torch.randn(16, width, generator=generator)


def loss_of(model, factor=1.0, recomputes=False):
    x, wanted = batch()
    for block in model:
        x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    assert x.dtype == torch.float32
    return factor * (x - wanted).square().mean()


def gradients(model):
    return [[p.grad for p in block.parameters()] for block in model]


@pytest.mark.parametrize("recomputed", ["nothing", "blocks", "branches"])
def test_gradients_are_those_of_32_bit(recomputed):
    plain, scaled = network(), network()
    loss_of(plain).backward()
    if recomputed == "branches":  # by a lever that the recipe names before
        recompute([block.branch for block in scaled])
    scaled, scales, filtered = with_scales(scaled, [2.0 ** (10 + i) for i in range(6)])
    loss_of(scaled, recomputes=recomputed == "blocks").backward()
    carried = gradients(scaled)[5][1].clone()
    assert all(unscale(found, scale) for found, scale in zip(gradients(scaled), scales, strict=True))
    assert torch.equal(gradients(scaled)[5][1], carried / scales[5])  # until then they carried their block's scale
    for found, wanted in zip(gradients(scaled), gradients(plain), strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == torch.float32
            assert (a - b).norm() < 2e-3 * b.norm()  # roundings of 2^-11, through a few products each
    whole = [torch.cat([g.flatten() for block in gradients(model) for g in block]) for model in (plain, scaled)]
    assert (whole[0] - whole[1]).norm() < 1e-3 * whole[0].norm()
    assert filtered.sum() == 0
    assert list(scaled.state_dict()) == list(plain.state_dict())


def test_recomputation_ends_with_the_last_product():
    """What follows it, such as the message of a divided branch, is not repeated."""
    blocks, ends = network(), []
    recompute(blocks)
    scaled, _, _ = with_scales(blocks, [2.0**10] * 6)
    for block in scaled:
        block.branch[-1].register_forward_pre_hook(lambda *_: ends.append("end"))
    loss = loss_of(scaled)
    assert len(ends) == 6
    loss.backward()
    assert len(ends) == 6


def test_scales_far_too_large_are_seen_and_the_filter_spares_earlier_blocks():
    scaled, scales, filtered = with_scales(network(), [2.0**13] * 4 + [2.0**30] + [2.0**13])
    loss_of(scaled).backward()
    finite = [bool(unscale(found, scale)) for found, scale in zip(gradients(scaled), scales, strict=True)]
    assert finite == [True] * 4 + [False, True]
    assert (filtered > 0).tolist() == [False] * 4 + [True, False]


def test_without_the_filter_earlier_blocks_would_overflow(monkeypatch):
    monkeypatch.setattr(Enter, "backward", staticmethod(lambda ctx, g: (g.float() / ctx.saved_tensors[0], None, None)))
    scaled, scales, _ = with_scales(network(), [2.0**13] * 4 + [2.0**30] + [2.0**13])
    loss_of(scaled).backward()
    finite = [bool(unscale(found, scale)) for found, scale in zip(gradients(scaled), scales, strict=True)]
    assert finite == [False] * 5 + [True]


def test_the_two_functions_by_themselves():
    x = torch.tensor([1.0, 2.0, 1e6], requires_grad=True)
    filtered = torch.zeros((), dtype=torch.int64)
    inside = Enter.apply(x, torch.tensor(2.0**13), filtered)
    assert inside.dtype == torch.float16 and inside[2] == math.inf
    inside.backward(torch.tensor([2.0**-14, math.nan, -math.inf], dtype=torch.float16))
    assert x.grad.tolist() == [2.0**-27, 0.0, 0.0] and filtered == 2  # 16 bits would hold nothing below 2^-24
    y = torch.ones(2, dtype=torch.float16, requires_grad=True)
    out = Leave.apply(y, torch.tensor(1024.0))
    assert out.dtype == torch.float32
    out.backward(torch.tensor([2.0**-20, 1e3]))
    assert y.grad.tolist() == [2.0**-10, math.inf]


def test_shards_without_elements_and_16_bit_gradients():
    scale, wide, narrow = torch.tensor(4.0), torch.tensor([8.0]), torch.tensor([8.0], dtype=torch.float16)
    assert unscale([], scale) and unscale([torch.empty(0)], scale)
    assert unscale([torch.empty(0), wide, narrow], scale) and (wide.item(), narrow.item()) == (2, 8)
    assert not unscale([wide, narrow * math.inf], scale)


def zeros(found, wanted):
    """Gradients that are zero and should not be."""
    pairs = [(a, b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True)]
    return sum(((a == 0) & (b != 0)).sum().item() for a, b in pairs)


def best_global(gains, factor):
    """Gradients under fp16 autocast with the largest scale of all powers of two that does not overflow."""
    for exponent in range(40, -20, -1):
        model = network(gains=gains)
        x, wanted = batch()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        (2.0**exponent * factor * (out.float() - wanted).square().mean()).backward()
        found = [[g / 2.0**exponent for g in block] for block in gradients(model)]
        if all(torch.isfinite(g).all() for block in found for g in block):
            return found
    raise AssertionError("no scale is finite")


def test_one_scale_loses_gradients_that_scales_per_block_keep():
    """Branches whose inner gradients are a factor of 2^38 apart: fp16 keeps them with one scale each, not with one."""
    gains, factor = [2.0**-30, 1.0, 2.0**-30, 2.0**8, 2.0**-30, 1.0], 2.0**-8
    plain = network(gains=gains)
    loss_of(plain, factor).backward()
    wanted = gradients(plain)
    lost = zeros(best_global(gains, factor), wanted)

    rule = Scales.new(6, start=24.0)
    rule.window = 1  # to find the scales in few steps, from above
    for _ in range(60):
        model, scales, filtered = with_scales(network(gains=gains), rule.values())
        loss_of(model, factor).backward()
        finite = torch.stack([unscale(g, s) for g, s in zip(gradients(model), scales, strict=True)]) & (filtered == 0)
        if finite.all():
            break
        rule = rule.after(finite)
    assert finite.all()
    kept = zeros(gradients(model), wanted)
    count = sum(g.numel() for block in wanted for g in block)
    print(f"of {count} gradients lost: one scale {lost}, one per block {kept}")
    assert lost > 0.05 * count
    assert kept < 0.01 * lost


def test_a_scaled_branch_is_copied_and_saved_as_before():
    branch = nn.Sequential(nn.Linear(4, 4))
    names = list(branch.state_dict())
    scale_branch(branch, torch.tensor(8.0), torch.zeros((), dtype=torch.int64))
    assert isinstance(branch, nn.Sequential) and isinstance(branch, ScaledBranch)
    assert list(branch.state_dict()) == names
    other = copy.deepcopy(branch)
    x = torch.randn(2, 4)
    assert torch.equal(other(x), branch(x)) and other[0] is not branch[0]
