"""Comparisons with publications: passes of deep models from those of shallow ones, and the constants that are used."""

import dataclasses

import pytest
import torch

from benchmarks.common.published_gpt2 import FEW, Gpt2, deepened
from benchmarks.common.published_scaling import GPT2, REST, fitted_v100, gpt2_trace
from recipes.planning.hardware.gpus import SHARES, V100_SHARES
from recipes.planning.tracing.trace import PASSES, trace


def test_deep_models_follow_from_shallow_ones():
    def traced(layers):
        with torch.device("meta"):
            task = Gpt2(layers=layers, width=32, heads=2, tokens=64)
        return trace(task, Gpt2.batch(2))

    deep, found = traced(5), deepened(*(traced(few) for few in FEW), 5)
    for way in PASSES:
        assert sorted(map(dataclasses.astuple, getattr(found, way))) == sorted(
            map(dataclasses.astuple, getattr(deep, way))
        )


def test_sizes_and_work_of_gpt2_are_the_closed_forms():
    layers, width, _ = GPT2[8]
    found, own, whole, (count, values) = gpt2_trace(*GPT2[8], 8)
    blocks, table = 12 * layers * width**2, 51200 * width
    assert whole == blocks + table + layers * 13 * width + 1024 * width + 2 * width  # with biases, norms, positions
    assert own == pytest.approx((blocks + table) / 8, rel=0.01)
    # Per token 2 FLOPs for each value of a matrix, and 4 for each pair of positions and channel.
    products = (2 * blocks + 4 * layers * 1024 * width) * 1024  # of one layer's kind, for one of 8 sequences
    table_products = 2 * table * 1024
    assert found.flops == products + table_products
    # Layers run twice, the table's product does not; the backward pass takes twice as many as the forward pass.
    assert sum(o.flops for o in found.executed(recompute=True)) == 4 * products + 3 * table_products
    assert (count, values) == (4 * layers, 8 * 1024 * width)


def test_the_constants_of_the_v100_are_those_that_are_fitted():
    found, rest = fitted_v100(SHARES)
    assert rest == pytest.approx(REST, rel=0.005)
    assert found.compute == pytest.approx(V100_SHARES.compute, rel=0.005)
    assert found.links == pytest.approx(V100_SHARES.links, rel=0.005)
