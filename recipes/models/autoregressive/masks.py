"""Which tokens a layer's attention may see (DALL-E, Ramesh et al. 2021, appendix B.1 and figure 11).

A sequence is T text positions followed by the image grid, row by row. Each mask is a pure function of the positions of
a query and a key, for integer tensors of any shape. Dense masks, block masks and caches are all derived from it.

All three masks of the image depend only on how far the key precedes the query in raster order. They therefore continue
across the ends of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["row", "column", "convolution"]
Visible = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TokenLayout:
    """The positions of a sequence.

    Attributes:
        text: text positions, T.
        side: number of rows, and of columns, of the image grid.
        kernel: side of the neighbourhood of convolutional attention, an odd number.
    """

    text: int
    side: int
    kernel: int = 11

    def __post_init__(self) -> None:
        if self.text < 1 or self.side < 1:
            raise ValueError(
                f"transformer: {self.text} text positions and a grid of side {self.side}: give 1 or more of each"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"transformer: kernel {self.kernel}: give an odd number, so that it has a centre")

    @property
    def image(self) -> int:
        """Image positions, N."""
        return self.side**2

    @property
    def length(self) -> int:
        """All positions."""
        return self.text + self.image


def layer_kinds(layers: int) -> list[Kind]:
    """The mask of each layer i, counted from 1: column if (i - 2) mod 4 = 0, else row; convolution for the last."""
    kinds: list[Kind] = ["column" if (i - 2) % 4 == 0 else "row" for i in range(1, layers)]
    return [*kinds, "convolution"]


def reach(kind: Kind, layout: TokenLayout) -> int:
    """The largest distance, in tokens, at which an image token sees an earlier image token."""
    half = layout.kernel // 2
    longest = {"row": layout.side, "column": layout.image - 1, "convolution": half * layout.side + half}
    return min(longest[kind], layout.image - 1)


def near(kind: Kind, layout: TokenLayout, distance: Tensor) -> Tensor:
    """Whether an image token sees the image token at a distance before it in raster order.

    Args:
        kind: kind of the mask.
        layout: positions of the sequence.
        distance: integers of any shape; below 0 the result is meaningless.

    Returns:
        bool, of the same shape.
    """
    side, half = layout.side, layout.kernel // 2
    if kind == "row":
        return distance <= side
    if kind == "column":
        return distance % side == 0
    # `up` rows above, the columns from -half to half are at distances from up * side - half to up * side + half. If the
    # grid is narrower than the kernel, these ranges overlap; the highest `up` whose range has begun decides.
    up = ((distance + half) // side).clamp(max=half)
    return distance + half - up * side < layout.kernel


def visible(kind: Kind, layout: TokenLayout) -> Visible:
    """The mask of a layer as a function: (query positions, key positions) -> whether the query sees the key.

    Positions are in raster order. Text sees itself and earlier text. The image sees all text, and of the image what its
    mask shows.
    """

    def sees(query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        return (distance >= 0) & ((key < layout.text) | near(kind, layout, distance))

    return sees


def visible_by_columns(layout: TokenLayout) -> Visible:
    """The column mask for positions that run down the columns of the grid, one column after another.

    Each token then sees a contiguous run of tokens before it, which suits block-sparse kernels.
    """

    def sees(query: Tensor, key: Tensor) -> Tensor:
        column = (query - layout.text) // layout.side == (key - layout.text) // layout.side
        return (query >= key) & ((key < layout.text) | column)

    return sees


def dense_mask(sees: Visible, length: int, device: torch.device | None = None) -> Tensor:
    """The mask as (length, length) bool, with queries as rows and keys as columns."""
    positions = torch.arange(length, device=device)
    return sees(positions[:, None], positions[None, :])


def visible_pairs(kind: Kind, layout: TokenLayout) -> int:
    """The number of (query, key) pairs that a mask shows."""
    return int(dense_mask(visible(kind, layout), layout.length, torch.device("cpu")).sum())
