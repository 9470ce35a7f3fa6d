"""The keys and values that sampling keeps: for each layer only those that a later token can see.

All layers keep the text. Of the image, a row layer keeps the last row and the token itself, and a convolutional layer
the rows that its neighbourhood reaches, both in ring buffers. A column layer keeps all columns and reads its own.

After the first call each further one takes one token. These calls have the same shapes for every token, write to the
same memory, and take the number of the token from the device: they can be captured as one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from recipes.models.autoregressive.masks import Kind, TokenLayout, dense_mask, near, reach, visible
from recipes.models.autoregressive.sparse_attention import Attend, attend_in_two

# Letters: C captions, n sequences per caption (C * n = B), H heads, D head width, T text positions, N image positions,
# K image tokens that a token sees at most.

Numbers = TypeVar("Numbers", int, Tensor)


@dataclass(frozen=True)
class Place:
    """Where one image token is kept, and what it sees.

    Attributes:
        slot: (1,) int64, its own slot.
        seen: (K,) int64, the slots that it may see; None: all.
        hidden: (K,) bool, which of them it does not see, because the image does not reach that far back.
    """

    slot: Tensor
    seen: Tensor | None
    hidden: Tensor


class Slots:
    """The slots of image tokens in the caches of all layers with the same kind of mask.

    Args:
        kind: kind of the mask.
        layout: positions of the sequence.
    """

    def __init__(self, kind: Kind, layout: TokenLayout) -> None:
        self.kind = kind
        self.side = layout.side
        self.count = layout.image if kind == "column" else reach(kind, layout) + 1
        number, distance = torch.arange(layout.image), torch.arange(self.count)
        distances = distance[near(kind, layout, distance)]  # of all visible tokens, itself first
        seen = number[:, None] - distances  # (N, K), image tokens
        self._own, self._hidden = self.of(number), seen < 0
        if kind == "row":  # sees all of the ring buffer, in the order of its slots
            self._seen, self._hidden = None, torch.empty_like(self._hidden).scatter_(1, self.of(seen), self._hidden)
        else:
            self._seen = self.of(torch.where(self._hidden, number[:, None], seen))

    def to(self, device: torch.device) -> Slots:
        """Move the tables to the device of the keys: an index from the host would be copied there for every token."""
        self._own, self._hidden = self._own.to(device), self._hidden.to(device)
        self._seen = None if self._seen is None else self._seen.to(device)
        return self

    def of(self, number: Numbers) -> Numbers:
        """The slot of an image token, or of several: column by column, or in the ring buffer."""
        side = self.side
        return number % side * side + number // side if self.kind == "column" else number % self.count

    def place(self, number: Tensor) -> Place:
        """The place of image token `number`, (1,) int64."""
        seen = None if self._seen is None else self._seen.index_select(0, number)[0]
        return Place(self._own.index_select(0, number), seen, self._hidden.index_select(0, number)[0])


class LayerCache(Attend):
    """The keys and values of one layer. The first call takes text and given image tokens, each later call one token.

    Args:
        slots: those of the layer's kind of mask.
        layout: positions of the sequence.
        repeat: n. The sequences of a caption share the keys of the text and of the given image tokens.
    """

    def __init__(self, slots: Slots, layout: TokenLayout, repeat: int) -> None:
        self.slots = slots
        self.layout = layout
        self.repeat = repeat
        self.place: Place | None = None  # of the token of the next call
        self.text: tuple[Tensor, Tensor] | None = None  # (C, H, T, D), keys and values
        self.kept: tuple[Tensor, Tensor] | None = None  # (C, H, n, slots, D), keys and values

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(C, H, T + given, D) each at first, then (B, H, 1, D) each -> as q."""
        return self._begin(q, k, v) if self.text is None else self._step(q, k, v, self.place)

    def _begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        text = self.layout.text
        assert k.shape[2] >= text, "a cache begins with all of the text"
        self.text = k[:, :, :text].contiguous(), v[:, :, :text].contiguous()
        self.kept = self._keep(k[:, :, text:]), self._keep(v[:, :, text:])
        mask = dense_mask(visible(self.slots.kind, self.layout), k.shape[2], q.device)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _keep(self, given: Tensor) -> Tensor:
        """(C, H, given, D) -> (C, H, n, slots, D), with each token that can still be seen in its slot."""
        captions, heads, count, width = given.shape
        kept = given.new_zeros(captions, heads, self.repeat, self.slots.count, width)
        first = max(0, count - self.slots.count)
        kept[:, :, :, self.slots.of(torch.arange(first, count, device=given.device))] = given[:, :, None, first:]
        return kept

    def _step(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        # The n sequences of a caption are one group of queries, so that the keys of its text are read only once.
        q, k, v = (x.unflatten(0, (-1, self.repeat)).transpose(1, 2) for x in (q, k, v))  # (C, H, n, 1, D)
        for kept, new in zip(self.kept, (k, v), strict=True):
            kept.index_copy_(3, place.slot, new)
        seen = [kept if place.seen is None else kept.index_select(3, place.seen) for kept in self.kept]
        out = attend_in_two(q, *self.text, *seen, place.hidden)  # (C, H, n, 1, D)
        return out.transpose(1, 2).flatten(0, 1)


class Caches:
    """The caches of all layers.

    Attributes:
        layers: one cache per layer.
        image: (1,) int64, the number of image tokens so far, on the device of the keys from the first call on.
    """

    def __init__(self, kinds: list[Kind], layout: TokenLayout, repeat: int) -> None:
        self.slots = {kind: Slots(kind, layout) for kind in kinds}
        self.layers = [LayerCache(self.slots[kind], layout, repeat) for kind in kinds]
        self.image = torch.zeros(1, dtype=torch.int64)

    def begin(self, device: torch.device) -> None:
        """The first call begins."""
        self.image = self.image.to(device)
        for slots in self.slots.values():
            slots.to(device)

    def begin_token(self) -> None:
        """The call for the next token begins."""
        places = {kind: slots.place(self.image) for kind, slots in self.slots.items()}
        for layer in self.layers:
            layer.place = places[layer.slots.kind]

    @property
    def numbers(self) -> int:
        """The number of elements of all keys and values."""
        return sum(x.numel() for layer in self.layers for x in (*layer.text, *layer.kept))
