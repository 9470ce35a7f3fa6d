"""The blocks that FlexAttention computes with each mask, by hand, and the table of attention."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import decoder
from benchmarks.common import flex_blocks, reporting
from benchmarks.common.flex_blocks import NARROW, block_share
from recipes.models.autoregressive.masks import TokenLayout, visible_pairs

LAYOUT = TokenLayout(256, 32)


def test_blocks_of_the_masks_of_the_published_grid():
    """Text alone has 256 * 257 / 2 pairs; an image token sees 256 of text, and the image tokens of its mask."""
    text = 256 * 257 // 2
    assert visible_pairs("column", LAYOUT) == text + 1024 * 256 + 32 * sum(range(1, 33))
    assert visible_pairs("row", LAYOUT) == text + 1024 * 256 + sum(min(i + 1, 33) for i in range(1024))
    # Rows of blocks: two of text (1 + 2), eight of the image with both text blocks and one (columns) or two of theirs.
    assert block_share("column", LAYOUT) == pytest.approx((3 + 8 * 3) / 55)
    assert block_share("row", LAYOUT) == pytest.approx((3 + 8 * 4 - 1) / 55)
    # With 64 keys per block: 10% and 7% fewer pairs, and those of a column are half of a block's.
    assert block_share("row", LAYOUT, NARROW) == pytest.approx(30.5 / 55)
    assert block_share("convolution", LAYOUT, NARROW) / block_share("convolution", LAYOUT) == pytest.approx(0.925)


def test_an_implementation_that_fails_is_a_row(tmp_path, monkeypatch):
    """And so is one that cannot be made; the others are measured, and dense attention is their reference."""

    def fails(kind, layout, device):
        if kind == "row":
            raise NotImplementedError("no kernel for\n64 keys")
        return (lambda q, k, v: q @ v) if kind == "column" else (lambda q, k, v: q + k + v)

    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(decoder, "narrow_attend", fails)
    narrower = decoder.narrower_attention
    monkeypatch.setattr(decoder, "narrower_attention", lambda layout, device: narrower(layout, SameWithGPU(device)))
    decoder.main(["--parts", "attention", "--size", "tiny", "--batch", "1", "--rounds", "1"])
    (path,) = tmp_path.glob("decoder_attention-tiny-*.json")
    rows = {(row["mask"], row["implementation"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows["row", decoder.FEWER_KEYS]["ms"] == "NotImplementedError: no kernel for 64 keys"
    assert rows["column", decoder.FEWER_KEYS]["ms"].startswith("RuntimeError: Expected size")
    measured = [row for row in rows.values() if isinstance(row["ms"], float)]
    assert len(measured) == len(rows) - 2 >= 8
    assert all(row["speed relative to dense causal"] > 0 for row in measured)


def test_speeds_are_relative_to_dense_attention():
    device = SimpleNamespace(gpu=False, seconds=lambda work, rounds, warm: [work()])
    rounds = iter([0.5, 1.0, 0.6, 0.3, 0.9, 0.2])
    works = dict.fromkeys((decoder.DENSE, ("row", "local")), lambda: next(rounds))
    dense, row = decoder.attention_rows(works, [], LAYOUT, device, 3)
    assert (dense["ms"], row["ms"], row["speed relative to dense causal"]) == (600.0, 300.0, 2.0)


class SameWithGPU:
    """A device of the benchmark, as if it were a GPU."""

    def __init__(self, device):
        self.device, self.gpu = device.device, True


def test_narrow_blocks_have_tiles_that_fit():
    """Those of both passes divide the block, in which PyTorch would find its own tiles too large."""
    attend = flex_blocks.narrow_attend("column", TokenLayout(64, 8), torch.device("cpu"))
    queries, keys = attend.flex.blocks.BLOCK_SIZE
    assert (queries, keys) == NARROW
    sizes = {name: value for name, value in attend.flex.options.items() if "BLOCK" in name}
    assert len(sizes) == 6 and all((queries if "_M" in name else keys) % size == 0 for name, size in sizes.items())
