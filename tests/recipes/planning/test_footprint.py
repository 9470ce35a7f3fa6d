"""What a recipe takes and sends, of models small enough to count by hand."""

from types import SimpleNamespace

import pytest
from torch import nn

from data.cost import Cost
from recipes.config.recipe import FSDP
from recipes.planning.costs import Costs
from recipes.planning.devices import Devices
from recipes.planning.footprint import (
    gathered_at_once,
    gathered_sizes,
    gradient_traffic,
    memory_text,
    microbatches_of,
    shard_traffic,
    state_bytes,
)


class TwoLayers(nn.Module):
    """A block of 12 parameters and 4 of a norm, and 20 others."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(2))
        self.rest = nn.Linear(3, 5)

    def blocks(self):
        return [self.block]


def test_frozen_weights_have_no_gradients_and_the_optimizer_says_what_a_device_has():
    """Of 10 values 6 are trained, 4 of these in 16 bits with their gradients; a device has half of them."""
    costs = Costs(Cost(), {}, Cost(device_bytes=100), {"scaling": Cost(stored_16_bit=4)}, {})
    assert state_bytes(10, 6, 0.5, costs) == ((6 * 4 + 4 * 2) + (2 * 4 + 4 * 2)) / 2 + 100


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (Cost(note="two moments in fp32"), "gradients, two moments in fp32; activations"),
        (Cost(), "gradients (without the state of mine.lion, which reports no cost); activations"),
    ],
)
def test_an_optimizer_without_a_cost_is_said(cost, expected):
    """Those of other packages; the memory would be taken for all that the run needs."""
    training = SimpleNamespace(fsdp=None, microbatch=None, device_batch=lambda ranks: 4)
    recipe = SimpleNamespace(training=training, optimizer=SimpleNamespace(name="mine.lion"))
    text = memory_text(recipe, TwoLayers(), Costs(Cost(), {}, cost, {}, {}), Devices(1, 1))
    assert expected in text


def test_gradients_are_averaged_by_rows_of_shards_and_in_their_own_format():
    """Two replicas send each byte once. Of 5 rows, one of two shards has 3."""
    layer = nn.Linear(3, 5)
    assert gradient_traffic(layer, Devices(2, 2)) == 4 * 20
    assert gradient_traffic(layer, Devices(4, 2)) == 4 * (9 + 3)
    assert gradient_traffic(layer, Devices(2, 2), stored_16_bit=15) == 2 * 15 + 4 * 5
    layer.bias.requires_grad_(False)  # nothing is sent for what is not trained
    assert gradient_traffic(layer, Devices(2, 2)) == 4 * 15


@pytest.mark.parametrize(
    ("algorithm", "precision", "wrap", "sizes"),
    [
        (None, "fp32", "blocks", [4 * 16, 4 * 20]),
        (None, "amp_bf16", "blocks", [2 * 12, 4 * 24]),  # norms are gathered with what lies outside of blocks
        (None, "amp_bf16", "model", [2 * 32 + 4 * 4]),
        ("fp16", "fp32", "blocks", [2 * 12, 4 * 24]),
        ("fp16", "fp32", "model", [4 * 36]),
    ],
)
def test_units_are_gathered_in_their_own_format(algorithm, precision, wrap, sizes):
    recipe = SimpleNamespace(training=SimpleNamespace(fsdp=FSDP(wrap=wrap), precision=precision))
    costs = Costs(Cost(), {}, Cost(), {"scaling": Cost(gathered=algorithm)}, {})
    assert gathered_sizes(recipe, TwoLayers(), costs, Devices(2, 1)) == sizes


@pytest.mark.parametrize(("asked", "precision", "sizes"), [("fp32", "amp_bf16", [64, 80]), ("bf16", "fp32", [24, 96])])
def test_units_are_gathered_in_the_format_that_is_asked_for(asked, precision, sizes):
    recipe = SimpleNamespace(training=SimpleNamespace(fsdp=FSDP(parameters=asked), precision=precision))
    costs = Costs(Cost(), {}, Cost(), {"scaling": Cost(gathered="fp16")}, {})
    assert gathered_sizes(recipe, TwoLayers(), costs, Devices(2, 1)) == sizes


@pytest.mark.parametrize(("microbatch", "passes"), [(2, 3), (5, 1), ("auto", 1), (None, 1)])
def test_a_smaller_last_microbatch_is_one(microbatch, passes):
    training = SimpleNamespace(microbatch=microbatch, device_batch=lambda world: 10 // world)
    assert microbatches_of(SimpleNamespace(training=training), Devices(2, 2)) == passes


@pytest.mark.parametrize(
    ("strategy", "sync", "weights", "gradients", "at_once"),
    [
        ("SHARD_GRAD_OP", "microbatch", 3 * 17, 3, 17),
        ("SHARD_GRAD_OP", "batch", 17, 1, 17),
        ("FULL_SHARD", "microbatch", 3 * (2 * 10 + 7), 3, 2 * 4 + 7),
        ("FULL_SHARD", "batch", 3 * (2 * 10 + 7), 1, 2 * 4 + 7),
    ],
)
def test_what_is_gathered_in_three_microbatches(strategy, sync, weights, gradients, at_once):
    """Three blocks, of 3, 4 and 3 bytes, and 7 outside of them. Each of four devices has a quarter already."""
    fsdp, units = FSDP(strategy=strategy, sync=sync), [3, 4, 3, 7]
    assert shard_traffic(fsdp, Devices(4, 1), units, values=17, passes=3) == (3 / 4 * weights, 3 * gradients * 17)
    assert gathered_at_once(fsdp, units) == at_once
    assert gathered_at_once(fsdp, [3, 7]) == 10 and gathered_at_once(fsdp, [17]) == 17  # one block; none
