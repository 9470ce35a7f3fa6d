"""What FlexAttention's blocks are expected to save, by hand."""

import pytest

from benchmarks.decoder import block_share
from recipes.models.autoregressive.masks import TokenLayout, visible_pairs

LAYOUT = TokenLayout(256, 32)


def test_what_the_masks_of_the_published_grid_save():
    """Text alone has 256 * 257 / 2 pairs; an image token sees 256 of text, and its mask."""
    text = 256 * 257 // 2
    assert visible_pairs("column", LAYOUT) == text + 1024 * 256 + 32 * sum(range(1, 33))
    assert visible_pairs("row", LAYOUT) == text + 1024 * 256 + sum(min(i + 1, 33) for i in range(1024))
    # Rows of blocks: two of text (1 + 2), eight of the image with both text blocks and one (columns) or two of theirs.
    assert block_share("column", LAYOUT) == pytest.approx((3 + 8 * 3) / 55)
    assert block_share("row", LAYOUT) == pytest.approx((3 + 8 * 4 - 1) / 55)
