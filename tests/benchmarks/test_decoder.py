"""The FLOPs that MFU is taken of, against a counter and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.decoder import GRID, SIZES, block_share, flops, matrix_weights, pairs
from recipes.models.autoregressive import Autoregressive
from recipes.models.masks import Layout

LAYOUT = Layout(256, 32)


def test_flops_are_those_of_the_forward_pass_three_times():
    sizes = {"layers": 3, "width": 16, "heads": 2, "text_vocabulary": 8, "codes": 4}
    network = Autoregressive(**sizes, text_positions=6, side=4, kernel=3, attention="masked").network
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = network(torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long))
        network.unembedding(hidden)
    # Forward and backward; the counter knows no fused attention on a CPU. Of attention: two products of a pair and head
    # width, at two FLOPs each.
    whole = 3 * counter.get_total_flops() + 3 * 2 * 2 * 16 * 3 * 22**2
    assert flops(network, sparse=False) == pytest.approx(whole)
    seen = sum(pairs(kind, network.layout) for kind in network.kinds)
    assert flops(network, sparse=False) - flops(network, sparse=True) == 12 * 16 * (3 * 22**2 - seen)


def test_what_the_masks_of_the_published_grid_save():
    """Text alone has 256 * 257 / 2 pairs; an image token sees 256 of text, and its mask."""
    text = 256 * 257 // 2
    assert pairs("column", LAYOUT) == text + 1024 * 256 + 32 * sum(range(1, 33))
    assert pairs("row", LAYOUT) == text + 1024 * 256 + sum(min(i + 1, 33) for i in range(1024))
    # Rows of blocks: two of text (1 + 2), eight of the image with both text blocks and one (columns) or two of theirs.
    assert block_share("column", LAYOUT) == pytest.approx((3 + 8 * 3) / 55)
    assert block_share("row", LAYOUT) == pytest.approx((3 + 8 * 4 - 1) / 55)


def test_the_size_of_the_recipe():
    with torch.device("meta"):
        network = Autoregressive(**SIZES["1b"], **GRID).network
    assert matrix_weights(network) == 12 * 24 * 2048**2 + 2048 * 24576
