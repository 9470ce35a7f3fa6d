"""What every training data component returns: a loader, and what is still to be done to a batch on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader

from data.manifest import Manifest

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Placement:
    """The part of a data set that a process reads.

    Attributes:
        batch: samples a device takes at once.
        training: shuffled and endless or epoch by epoch, against once in order.
        rank: this process's number.
        world: number of processes.
        seed: seed of the order.
        pin: page-locked batches, for a GPU.
    """

    batch: int
    training: bool
    rank: int = 0
    world: int = 1
    seed: int = 17
    pin: bool = False


@dataclass(frozen=True)
class Loading:
    """Batches of a data set.

    Attributes:
        loader: yields dicts of CPU tensors.
        on_device: applied to each (micro)batch after it was moved to the device.
        samples: in an epoch, over all ranks; None where the stream has no end.
        manifest: what encoded the samples, where they are encoded.
        resolution: side of the pictures in pixels, where they are encoded.
        null_text: (L, D) float16, the embedding of the empty caption, where text is encoded.
        vocabulary: file of the vocabulary that captions are encoded with, where training encodes them.
    """

    loader: DataLoader
    on_device: Callable[[Batch], Batch] | None = None
    samples: int | None = None
    manifest: Manifest | None = None
    resolution: int | None = None
    null_text: Tensor | None = None
    vocabulary: Path | None = None
