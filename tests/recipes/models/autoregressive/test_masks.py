"""The attention masks, held against an enumeration of what the specification says of each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.models.autoregressive.masks import (
    TokenLayout,
    dense_mask,
    layer_kinds,
    near,
    reach,
    visible,
    visible_by_columns,
)
from recipes.models.autoregressive.sparse_attention import transpose_grid

KINDS = ["row", "column", "convolution"]
layouts = st.builds(TokenLayout, st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 3, 5, 11]))


def seen(kind, layout, i):
    """The image tokens that image token i sees, by the words of the specification."""
    side, half = layout.side, layout.kernel // 2
    if kind == "row":  # itself and the W before it in raster order
        found = {i - back for back in range(side + 1)}
    elif kind == "column":  # itself and those of its column in all earlier rows
        found = {row * side + i % side for row in range(i // side + 1)}
    else:  # the causal part of a square around it, which wraps around row ends as raster order does
        found = {i - (up * side + left) for up in range(half + 1) for left in range(-half, half + 1)}
    return {j for j in found if 0 <= j <= i}


def enumerated(kind, layout):
    mask = torch.zeros(layout.length, layout.length, dtype=torch.bool)
    for query in range(layout.length):
        mask[query, : min(query + 1, layout.text)] = True  # all text, or the text so far
        if query >= layout.text:
            for j in seen(kind, layout, query - layout.text):
                mask[query, layout.text + j] = True
    return mask


@given(st.sampled_from(KINDS), layouts)
@settings(max_examples=80)
def test_every_pair_of_every_mask(kind, layout):
    assert (dense_mask(visible(kind, layout), layout.length) == enumerated(kind, layout)).all()


@given(st.sampled_from(KINDS), layouts)
@settings(max_examples=50)
def test_a_query_sees_itself_nothing_later_and_no_further_than_the_reach(kind, layout):
    mask = dense_mask(visible(kind, layout), layout.length)
    assert mask.diagonal().all() and not mask.triu(1).any()
    image = mask[layout.text :, layout.text :]
    furthest = max(int((i - torch.arange(len(image)))[row].max()) for i, row in enumerate(image))
    assert furthest == reach(kind, layout) or (kind == "column" and furthest <= reach(kind, layout))


@given(layouts)
@settings(max_examples=50)
def test_the_column_mask_by_columns_is_the_same_relation(layout):
    order = torch.arange(layout.text, layout.length)[None]
    order = torch.cat([torch.arange(layout.text), transpose_grid(order, layout.side)[0]])
    raster = dense_mask(visible("column", layout), layout.length)
    assert (dense_mask(visible_by_columns(layout), layout.length) == raster[order][:, order]).all()


def test_the_published_grid():
    layout = TokenLayout(256, 32)
    last = layout.length - 1
    counts = {kind: int(dense_mask(visible(kind, layout), layout.length)[last].sum()) - 256 for kind in KINDS}
    # The token above is the last one that a row sees; a column has 32; a neighbourhood of 11 by 5 and a half a row.
    assert counts == {"row": 33, "column": 32, "convolution": 5 * 11 + 6}
    row = dense_mask(visible("row", layout), layout.length)[last]
    assert row[last - 32] and not row[last - 33]


def test_a_narrow_grid_has_the_whole_neighbourhood():
    """Rows of a neighbourhood that overlap must not hide each other."""
    layout = TokenLayout(1, 2, 5)
    assert near("convolution", layout, torch.arange(10)).tolist() == [True] * 7 + [False] * 3


def test_kinds_of_layers():
    assert layer_kinds(6) == ["row", "column", "row", "row", "row", "convolution"]
    kinds = layer_kinds(64)
    assert [i for i, kind in enumerate(kinds, 1) if kind == "column"] == list(range(2, 64, 4))
    assert kinds.count("convolution") == 1 and kinds[-1] == "convolution" and len(kinds) == 64
    assert layer_kinds(1) == ["convolution"]


@pytest.mark.parametrize(("sizes", "message"), [((0, 4), "0 text"), ((4, 0), "side 0"), ((4, 4, 4), "odd")])
def test_layouts_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        TokenLayout(*sizes)
