"""A batch of decoded images, as a worker process passes it to the encoders."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from data.crops import Box
from data.sources.base import InputShard, Position, Rejected
from precompute.output.problems import Problem


@dataclass(frozen=True)
class ImageFacts:
    """What is stored of a sample besides what the encoders make of it.

    Attributes:
        width, height: of the original image, in pixels.
        boxes: the crops by resolution, in pixels of the original image.
    """

    position: Position
    key: str
    caption: str
    width: int
    height: int
    boxes: dict[int, list[Box]]

    @property
    def short_side(self) -> int:
        return min(self.width, self.height)


@dataclass(frozen=True)
class ShardEnd:
    """One reader's report that it came to the end of a shard.

    Attributes:
        samples: number of samples in the whole shard, rejected ones included.
        parts: number of readers that divide this shard among them.
    """

    shard: InputShard
    samples: int
    parts: int


@dataclass
class DecodedBatch:
    """Images and captions, ready to be encoded, and what happened while they were read.

    The tensors of all batches with images have the same shapes. Libraries choose their kernels, and so the order of
    sums, by the number of rows; and where a job was killed decides how many images its next start's last batch has.

    Attributes:
        pixels: uint8 (B, N, R, R, 3) by resolution R, N crops per image; black in rows that have no image. Without
            any image there is no row.
        tokens: int64 (B, L), the tokenized captions, that of "" in rows that have no image; empty where captions are
            not embedded.
        images: those of the first rows, up to B.
        rejected: samples that are not encoded, with their positions.
        ends: shards that were read to their end.
        failures: shards that could not be read, each with the reason.
    """

    pixels: dict[int, Tensor]
    tokens: Tensor
    images: list[ImageFacts]
    rejected: list[tuple[Position, Rejected]] = field(default_factory=list)
    ends: list[ShardEnd] = field(default_factory=list)
    failures: list[tuple[InputShard, Problem]] = field(default_factory=list)

    def pin_memory(self) -> DecodedBatch:
        """Moves the tensors to pinned memory. The DataLoader calls it where a GPU copies from the batch."""
        self.pixels = {resolution: pixels.pin_memory() for resolution, pixels in self.pixels.items()}
        self.tokens = self.tokens.pin_memory()
        return self
