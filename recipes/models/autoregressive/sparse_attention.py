"""Attention over text and image with the masks of `masks.py`, in several implementations that agree.

An implementation is an object that is made once per kind of mask and device, and called with queries, keys and values.
Letters: B batch, H heads, S positions = T text + N image, D head width, d model width, R grid side.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from recipes.models.autoregressive.flex import NARROWEST, SHORTEST, Backend, FlexAttention, block_mask
from recipes.models.autoregressive.masks import Kind, TokenLayout, dense_mask, near, visible, visible_by_columns

Implementation = Literal["auto", "flex", "local", "masked"]


class Attend(ABC):
    """Base class: attention over tokens in an order that the subclass defines, by default raster order."""

    def enter(self, x: Tensor) -> Tensor:
        """Activations (B, S, d) from raster order to the order of this attention."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Activations (B, S, d) from the order of this attention back to raster order."""
        return x

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, S, D) each -> (B, H, S, D)."""


class ByColumns(Attend):
    """Attention with the image in column order, in which the keys that a column layer sees are contiguous."""

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout

    def enter(self, x: Tensor) -> Tensor:
        text, image = x.split([self.layout.text, self.layout.image], dim=1)
        return torch.cat([text, transpose_grid(image, self.layout.side)], dim=1)

    leave = enter  # the grid is square: a transposition undoes itself


class MaskedAttend(Attend):
    """PyTorch's scaled_dot_product_attention over all keys, with a dense mask."""

    def __init__(self, kind: Kind, layout: TokenLayout, device: torch.device) -> None:
        self.mask = dense_mask(visible(kind, layout), layout.length, device)  # (S, S)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def flex_attend(
    kind: Kind, layout: TokenLayout, device: torch.device, backend: Backend | None = "inductor"
) -> Attend:
    """FlexAttention: computes only blocks of 128 x 128 with at least one visible pair. Needs a GPU.

    `backend` is that of torch.compile; None: without compilation, which computes all pairs.
    """
    return FlexColumns(layout, device, backend) if kind == "column" else FlexRaster(kind, layout, device, backend)


class FlexRaster(Attend):
    """The row and convolutional masks."""

    def __init__(self, kind: Kind, layout: TokenLayout, device: torch.device, backend: Backend | None) -> None:
        self.flex = FlexAttention(block_mask(visible(kind, layout), layout.length, device), backend)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.flex(q, k, v)


class FlexColumns(ByColumns):
    """The column mask: with the image in column order, its blocks lie next to the diagonal."""

    def __init__(self, layout: TokenLayout, device: torch.device, backend: Backend | None) -> None:
        super().__init__(layout)
        self.flex = FlexAttention(block_mask(visible_by_columns(layout), layout.length, device), backend)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.flex(q, k, v)


def local_attend(kind: Kind, layout: TokenLayout, device: torch.device) -> Attend:
    """Matrix products over the text and only those grid rows, or the one column, that a token can see.

    Scores are (N, T + keys) instead of (S, S). With 256 text positions and a grid of side 32, row and column layers
    need a quarter of the work. Meant for CPUs, which have no block-sparse kernels.
    """
    return LocalColumns(layout, device) if kind == "column" else LocalRows(kind, layout, device)


class LocalColumns(ByColumns):
    """The column mask: each column of the grid attends to the text and to itself."""

    def __init__(self, layout: TokenLayout, device: torch.device) -> None:
        super().__init__(layout)
        self.hidden = torch.ones(layout.side, layout.side, dtype=torch.bool, device=device).triu(1)  # (R, R)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (k_text, k_image), (v_text, v_image) = (_split(x, self.layout) for x in (k, v))

        def columns(x: Tensor) -> Tensor:
            return x.unflatten(2, (self.layout.side, self.layout.side))  # (B, H, R columns, R, D)

        return _text_then_image(q, k_text, v_text, columns(k_image), columns(v_image), self.hidden, self.layout)


class LocalRows(Attend):
    """The row and convolutional masks: each row of the grid attends to the text, itself and some rows above."""

    def __init__(self, kind: Kind, layout: TokenLayout, device: torch.device) -> None:
        self.layout = layout
        half = layout.kernel // 2
        self.above = min(1 if kind == "row" else half + 1, layout.side - 1)  # + 1: it wraps around the start of the row
        row = torch.arange(layout.side, device=device)
        query = row[:, None] * layout.side + row  # (R, R)
        first = (row - self.above) * layout.side
        key = first[:, None] + torch.arange((self.above + 1) * layout.side, device=device)  # (R, K)
        distance = query[:, :, None] - key[:, None, :]
        self.hidden = (distance < 0) | (key < 0)[:, None, :] | ~near(kind, layout, distance)  # (R, R, K)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (k_text, k_image), (v_text, v_image) = (_split(x, self.layout) for x in (k, v))

        def rows(x: Tensor) -> Tensor:
            padded = nn.functional.pad(x, (0, 0, self.above * self.layout.side, 0))
            windows = padded.unfold(2, (self.above + 1) * self.layout.side, self.layout.side)  # (B, H, R, D, K)
            return windows.transpose(-1, -2)  # (B, H, R rows, K, D), a view

        return _text_then_image(q, k_text, v_text, rows(k_image), rows(v_image), self.hidden, self.layout)


def _text_then_image(
    q: Tensor, k_text: Tensor, v_text: Tensor, k_local: Tensor, v_local: Tensor, hidden: Tensor, layout: TokenLayout
) -> Tensor:
    """Causal attention of the text, then attention of the image to all text and to its groups' own keys.

    Returns (B, H, S, D).
    """
    q_text, q_image = _split(q, layout)
    text = nn.functional.scaled_dot_product_attention(q_text, k_text, v_text, is_causal=True)  # (B, H, T, D)
    groups = q_image.unflatten(2, (layout.side, layout.side))  # (B, H, R, R, D)
    image = attend_in_two(groups, k_text, v_text, k_local, v_local, hidden)  # (B, H, R, R, D)
    return torch.cat([text, image.flatten(2, 3)], dim=2)


def attend_in_two(
    q: Tensor, k_text: Tensor, v_text: Tensor, k_local: Tensor, v_local: Tensor, hidden: Tensor
) -> Tensor:
    """Attention of groups of queries to keys that all groups share and to keys of each group, in one softmax.

    Args:
        q: (B, H, G, Q, D), G groups of Q queries.
        k_text, v_text: (B, H, T, D), visible to all queries.
        k_local, v_local: (B, H, G, K, D).
        hidden: bool, broadcastable to (G, Q, K): which local keys are not visible.

    Returns:
        (B, H, G, Q, D).
    """
    text = k_text.shape[2]
    q = (q / math.sqrt(q.shape[-1])).contiguous()  # otherwise each of two products would copy it
    shared = (q.flatten(2, 3) @ k_text.transpose(-1, -2)).unflatten(2, q.shape[2:4])  # (B, H, G, Q, T)
    local = (q @ k_local.transpose(-1, -2)).masked_fill(hidden, -torch.inf)  # (B, H, G, Q, K)
    weights = torch.cat([shared, local], dim=-1).softmax(dim=-1).to(v_text.dtype)
    on_text, on_local = weights.split([text, local.shape[-1]], dim=-1)
    from_text = (on_text.flatten(2, 3) @ v_text).unflatten(2, q.shape[2:4])
    return from_text + on_local @ v_local


def make_attend(
    implementation: Implementation, kind: Kind, layout: TokenLayout, device: torch.device, head_width: int
) -> Attend:
    """The attention for one kind of mask on one device.

    Args:
        implementation: see `resolve`.
        kind: kind of the mask.
        layout: positions of the sequence.
        device: device of queries, keys and values.
        head_width: width of each head of them.

    Raises:
        ValueError: flex without a GPU, for a short sequence, or for narrow heads.
    """
    makers = {"flex": flex_attend, "local": local_attend, "masked": MaskedAttend}
    return makers[resolve(implementation, layout, device.type, head_width)](kind, layout, device)


def resolve(
    implementation: Implementation, layout: TokenLayout, device: str, head_width: int
) -> Literal["flex", "local", "masked"]:
    """The implementation to use on a type of device.

    Args:
        implementation: auto: on a GPU flex for sequences of 128 or more positions and heads of width 16 or more,
            elsewhere local for grids of side 16 or more, else masked.
        layout: positions of the sequence.
        device: type of the device.
        head_width: width of each head.

    Raises:
        ValueError: flex without a GPU, for a short sequence, or for narrow heads.
    """
    if implementation == "auto":
        if device == "cuda":
            return "flex" if layout.length >= SHORTEST and head_width >= NARROWEST else "masked"
        # Time of local relative to masked, forward and backward on one core: 0.17 to 0.56 at a side of 32, 0.46 to
        # 0.92 at 16, and 2 to 2.5 at 8, where there is little to save.
        return "local" if layout.side >= 16 else "masked"
    if implementation == "flex" and device != "cuda":
        raise ValueError(f"autoregressive: attention: flex needs a GPU; use auto, local or masked on a {device}")
    if implementation == "flex" and layout.length < SHORTEST:
        raise ValueError(
            f"autoregressive: attention: flex is for sequences of {SHORTEST} or more positions, and these have "
            f"{layout.length}; use auto or masked"
        )
    if implementation == "flex" and head_width < NARROWEST:
        raise ValueError(
            f"autoregressive: attention: flex is for heads of width {NARROWEST} or more, and these have {head_width}; "
            "use auto or masked, or fewer heads"
        )
    return implementation


def transpose_grid(x: Tensor, side: int) -> Tensor:
    """(B, N, ...) from raster order to column order, or back."""
    return x.unflatten(1, (side, side)).transpose(1, 2).flatten(1, 2)


def _split(x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
    return x.split([layout.text, layout.image], dim=2)
