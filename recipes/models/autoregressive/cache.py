"""The keys and values that sampling keeps: for each layer only those that a later token can see.

All layers keep the text. Of the image, a row layer keeps the last row and the token itself, and a convolutional layer
the rows that its neighbourhood reaches, both in ring buffers. A column layer keeps all columns and reads its own.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TypeVar

import torch
from torch import Tensor, nn

from recipes.models.autoregressive.masks import Kind, TokenLayout, dense_mask, near, reach, visible
from recipes.models.autoregressive.sparse_attention import Attend, attend_in_two

# Letters: C captions, n sequences per caption (C * n = B), H heads, D head width, T text positions.

Numbers = TypeVar("Numbers", int, Tensor)


class LayerCache(Attend):
    """The keys and values of one layer. The first call takes text and given image tokens, each later call one token.

    Args:
        kind: kind of the layer's mask.
        layout: positions of the sequence.
        repeat: n. The sequences of a caption share the keys of the text and of the given image tokens.
    """

    def __init__(self, kind: Kind, layout: TokenLayout, repeat: int) -> None:
        self.kind = kind
        self.layout = layout
        self.repeat = repeat
        self.slots = layout.image if kind == "column" else reach(kind, layout) + 1
        distance = torch.arange(self.slots)
        self.distances = distance[near(kind, layout, distance)].tolist()  # of all visible tokens, itself first
        self.image = 0  # number of image tokens so far
        self.seen = torch.empty(0)  # (tokens, distances) int64, the slots that each token of a convolutional layer sees
        self.text: tuple[Tensor, Tensor] | None = None  # (C, H, T, D), keys and values
        self.kept: tuple[Tensor, Tensor] | None = None  # (C, H, n, slots, D), keys and values

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(C, H, T + given, D) each at first, then (B, H, 1, D) each -> as q."""
        return self._begin(q, k, v) if self.text is None else self._step(q, k, v)

    def _begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        text = self.layout.text
        assert k.shape[2] >= text, "a cache begins with all of the text"
        self.text = k[:, :, :text].contiguous(), v[:, :, :text].contiguous()
        self.kept = self._keep(k[:, :, text:]), self._keep(v[:, :, text:])
        self.image = k.shape[2] - text
        if self.kind == "convolution":  # on the device: a list of slots would be copied there for every token
            numbers = torch.arange(self.layout.image, device=k.device)[:, None]
            self.seen = self._slot(numbers - torch.tensor(self.distances, device=k.device))
        mask = dense_mask(visible(self.kind, self.layout), k.shape[2], q.device)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _keep(self, given: Tensor) -> Tensor:
        """(C, H, given, D) -> (C, H, n, slots, D), with each token that can still be seen in its slot."""
        captions, heads, count, width = given.shape
        kept = given.new_zeros(captions, heads, self.repeat, self.slots, width)
        first = max(0, count - self.slots)
        kept[:, :, :, self._slot(torch.arange(first, count, device=given.device))] = given[:, :, None, first:]
        return kept

    def _slot(self, number: Numbers) -> Numbers:
        """The slot of an image token, or of several: column by column, or in the ring buffer."""
        side = self.layout.side
        return number % side * side + number // side if self.kind == "column" else number % self.slots

    def _step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number, slot = self.image, self._slot(self.image)
        # The n sequences of a caption are one group of queries, so that the keys of its text are read only once.
        q, k, v = (x.unflatten(0, (-1, self.repeat)).transpose(1, 2) for x in (q, k, v))  # (C, H, n, 1, D)
        for kept, new in zip(self.kept, (k, v), strict=True):
            kept[:, :, :, slot] = new[:, :, :, 0]
        self.image += 1
        k_local, v_local = (self._seen(kept, number) for kept in self.kept)
        out = attend_in_two(q, *self.text, k_local, v_local, mask=None)  # (C, H, n, 1, D)
        return out.transpose(1, 2).flatten(0, 1)

    def _seen(self, kept: Tensor, number: int) -> Tensor:
        """(C, H, n, keys, D), what image token `number` sees, including itself."""
        side = self.layout.side
        if self.kind == "column":
            first = number % side * side
            return kept[:, :, :, first : first + number // side + 1]
        if self.kind == "row":  # all of the ring buffer
            return kept[:, :, :, : number + 1]
        return kept[:, :, :, self.seen[number, : bisect_right(self.distances, number)]]


class Caches:
    """The caches of all layers.

    Attributes:
        layers: one cache per layer.
        image: number of image tokens so far.
    """

    def __init__(self, kinds: list[Kind], layout: TokenLayout, repeat: int) -> None:
        self.layers = [LayerCache(kind, layout, repeat) for kind in kinds]
        self.image = 0

    @property
    def begun(self) -> bool:
        """Whether the caches hold the text already."""
        return self.layers[0].text is not None

    @property
    def numbers(self) -> int:
        """The number of elements of all keys and values."""
        return sum(x.numel() for layer in self.layers for x in (*layer.text, *layer.kept))
