"""Encodes one batch, in the precision in use or in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.encoders.base import ImageEncoder, Stored, TextEncoder


@dataclass
class Encodings:
    """The results of a batch on their way to the CPU.

    Attributes:
        images: what is stored of the images, by resolution.
        text: float16 (B, L, D); None where captions are not embedded.
        image_ok, text_ok: bool (B,), whether every value is finite in the format that is stored.
        ready: on a GPU, the event after the copies to the CPU; None where there is nothing to wait for.
    """

    images: dict[int, Stored]
    text: Tensor | None
    image_ok: Tensor
    text_ok: Tensor
    ready: torch.cuda.Event | None = None

    def to_cpu(self) -> Encodings:
        """Starts copies into pinned memory where the results are on a GPU."""
        if self.image_ok.device.type == "cpu":
            return self

        def copy(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

        images = {
            resolution: Stored({n: copy(a) for n, a in s.arrays.items()}, copy(s.finite), copy(s.sums))
            for resolution, s in self.images.items()
        }
        text, image_ok, text_ok = copy(self.text), copy(self.image_ok), copy(self.text_ok)
        ready = torch.cuda.Event()
        ready.record()
        return Encodings(images, text, image_ok, text_ok, ready)

    def wait(self) -> None:
        """Waits until the copies are complete."""
        if self.ready is not None:
            self.ready.synchronize()

    def not_finite(self, rows: int) -> list[int]:
        """Which of the first `rows` rows hold a value that is not finite. The copies must be complete."""
        good = (self.image_ok & self.text_ok).tolist()
        return [row for row in range(rows) if not good[row]]

    @property
    def in_flight(self) -> bool:
        return self.ready is not None and not self.ready.query()

    def replace(self, row: int, other: Encodings) -> None:
        """Copies the first row of other encodings into a row of these."""
        for resolution, old in self.images.items():
            new = other.images[resolution]
            for name in old.arrays:
                old.arrays[name][row] = new.arrays[name][0]
            if old.sums is not None:
                old.sums[row] = new.sums[0]
        if self.text is not None:
            self.text[row] = other.text[0]


def encode_exactly(
    row: int, pixels: dict[int, Tensor], tokens: Tensor, images: ImageEncoder, texts: TextEncoder | None
) -> Encodings:
    """Encodes one row of a batch in fp32, as rows are whose values are not finite. See `encode`.

    One row at a time: how many others there are must not matter, see `precompute.encoding.batch.DecodedBatch`.
    """
    squares = {resolution: values[row : row + 1] for resolution, values in pixels.items()}
    fresh = encode(squares, tokens[row : row + 1], images, texts, exact=True).to_cpu()
    fresh.wait()
    return fresh


@torch.no_grad()  # an encoder of one's own may have parameters besides those of its network
def encode(
    pixels: dict[int, Tensor], tokens: Tensor, images: ImageEncoder, texts: TextEncoder | None, exact: bool = False
) -> Encodings:
    """Encodes a batch as it will be stored.

    Args:
        pixels: uint8 (B, N, R, R, 3) by resolution R, N crops per image.
        tokens: int64 (B, L).
        images: the image encoder.
        texts: the text encoder, on the same device; None where captions are not embedded.
        exact: encode in fp32, with the weights as they are stored.
    """
    stored = {r: images.store(squares.to(images.device, non_blocking=True), exact) for r, squares in pixels.items()}
    image_ok = torch.stack([s.finite for s in stored.values()]).all(0)
    if texts is None:
        return Encodings(stored, None, image_ok, torch.ones_like(image_ok))
    text = texts.embed(tokens.to(texts.device, non_blocking=True), exact=exact).to(torch.float16, copy=True)
    return Encodings(stored, text, image_ok, text.isfinite().flatten(1).all(1))
