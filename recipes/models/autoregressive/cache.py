"""Keys and values that sampling keeps, of each layer only what a token to come can see.

All layers keep the text. Of the image, a row layer keeps the last row and the token itself, a convolutional one the
rows its neighbourhood reaches, both in rings; a column layer keeps each column and reads the one that it is in.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.models.autoregressive.masks import Kind, TokenLayout, dense_mask, near, reach, visible
from recipes.models.autoregressive.sparse_attention import Attend, attend_in_two

# Letters: C captions, n sequences a caption (C * n = B), H heads, D head width, T text positions.


class LayerCache(Attend):
    """The keys and values of one layer. The first call takes text and given image tokens, the later ones a token each.

    Args:
        kind: mask of the layer.
        layout: of the sequence.
        repeat: n; the sequences of a caption share the text's keys, and what of the image was given.
    """

    def __init__(self, kind: Kind, layout: TokenLayout, repeat: int) -> None:
        self.kind = kind
        self.layout = layout
        self.repeat = repeat
        self.slots = layout.image if kind == "column" else reach(kind, layout) + 1
        distance = torch.arange(self.slots)
        self.distances = distance[near(kind, layout, distance)].tolist()  # of all that is seen, itself first
        self.image = 0  # image tokens seen
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
        mask = dense_mask(visible(self.kind, self.layout), k.shape[2], q.device)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _keep(self, given: Tensor) -> Tensor:
        """(C, H, given, D) -> (C, H, n, slots, D), each token that is still to be seen in its slot."""
        captions, heads, count, width = given.shape
        kept = given.new_zeros(captions, heads, self.repeat, self.slots, width)
        first = max(0, count - self.slots)
        kept[:, :, :, [self._slot(number) for number in range(first, count)]] = given[:, :, None, first:]
        return kept

    def _slot(self, number: int) -> int:
        """Where an image token lies: column by column, or in the ring."""
        side = self.layout.side
        return number % side * side + number // side if self.kind == "column" else number % self.slots

    def _step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number, slot = self.image, self._slot(self.image)
        # The sequences of a caption are one group of queries to its text, whose keys are read once and not n times.
        q, k, v = (x.unflatten(0, (-1, self.repeat)).transpose(1, 2) for x in (q, k, v))  # (C, H, n, 1, D)
        for kept, new in zip(self.kept, (k, v), strict=True):
            kept[:, :, :, slot] = new[:, :, :, 0]
        self.image += 1
        k_local, v_local = (self._seen(kept, number) for kept in self.kept)
        out = attend_in_two(q, *self.text, k_local, v_local, mask=None)  # (C, H, n, 1, D)
        return out.transpose(1, 2).flatten(0, 1)

    def _seen(self, kept: Tensor, number: int) -> Tensor:
        """(C, H, n, keys, D), what image token `number` sees, itself included."""
        side = self.layout.side
        if self.kind == "column":
            first = number % side * side
            return kept[:, :, :, first : first + number // side + 1]
        if self.kind == "row":  # all of the ring
            return kept[:, :, :, : number + 1]
        return kept[:, :, :, [self._slot(number - distance) for distance in self.distances if distance <= number]]


class Caches:
    """The caches of all layers.

    Attributes:
        layers: one a layer.
        image: image tokens that they have seen.
    """

    def __init__(self, kinds: list[Kind], layout: TokenLayout, repeat: int) -> None:
        self.layers = [LayerCache(kind, layout, repeat) for kind in kinds]
        self.image = 0

    @property
    def begun(self) -> bool:
        """Whether they hold the text."""
        return self.layers[0].text is not None

    @property
    def numbers(self) -> int:
        """Keys and values that are kept, in numbers."""
        return sum(x.numel() for layer in self.layers for x in (*layer.text, *layer.kept))
