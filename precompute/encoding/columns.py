"""The MDS columns of an encoded sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from data.crops import Box

BASIC = {"key": "str", "caption": "str", "width": "int", "height": "int"}
REST = "the rest"  # the small columns among the bytes of a sample


@dataclass(frozen=True)
class LatentColumns:
    """Columns of a set of latents and text embeddings.

    Attributes:
        latents: (channels, height, width) of a latent, by resolution.
        text: (tokens, width) of a text embedding.
    """

    latents: dict[int, tuple[int, int, int]]
    text: tuple[int, int]

    @property
    def resolutions(self) -> list[int]:
        return list(self.latents)

    def encodings(self) -> dict[str, str]:
        """MDS encoding of each column."""
        columns = dict(BASIC)
        for resolution, shape in self.latents.items():
            columns[f"crop_{resolution}"] = "ndarray:int32:4"
            for name in ("mean", "std"):
                columns[f"{name}_{resolution}"] = f"ndarray:float16:{','.join(map(str, shape))}"
        columns["text"] = f"ndarray:float16:{','.join(map(str, self.text))}"
        return columns

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes per sample of the columns of fixed size."""
        parts = {f"latents {resolution}": 2 * 2 * prod(shape) for resolution, shape in self.latents.items()}
        return {**parts, "text": 2 * prod(self.text), REST: 16 * len(self.latents) + 16}


@dataclass(frozen=True)
class TokenColumns:
    """Columns of a set of image tokens.

    Attributes:
        grids: number of tokens of one crop, by resolution; they are stored in raster order.
        crops: number of crops per image.
    """

    grids: dict[int, int]
    crops: int
    latents: ClassVar[dict] = {}  # there are no statistics of tokens

    @property
    def resolutions(self) -> list[int]:
        return list(self.grids)

    def encodings(self) -> dict[str, str]:
        """MDS encoding of each column."""
        columns = dict(BASIC)
        for resolution, count in self.grids.items():
            columns[f"crop_{resolution}"] = f"ndarray:float32:{self.crops},4"
            columns[f"tokens_{resolution}"] = f"ndarray:uint16:{self.crops},{count}"
        return columns

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes per sample of the columns of fixed size."""
        parts = {f"tokens {resolution}": 2 * self.crops * count for resolution, count in self.grids.items()}
        return {**parts, REST: 16 * self.crops * len(self.grids) + 16}


def check_resolutions(resolutions: Iterable[int], downsample: int, encoder: str) -> None:
    """
    Args:
        resolutions: in pixels.
        downsample: image pixels per latent or token of the image encoder, along a side.
        encoder: its readable name.

    Raises:
        ValueError: a resolution is not a multiple of the downsampling factor.
    """
    for resolution in resolutions:
        if resolution % downsample:
            raise ValueError(f"resolutions: {resolution} is not a multiple of {downsample}, as {encoder} requires")


def stored_key(key: str) -> str:
    """A sample's key as it is stored: JSON and file names can hold lone surrogates, which have no UTF-8."""
    return key.encode("utf-8", "backslashreplace").decode()


def crop_column(kind: str, boxes: list[Box]) -> np.ndarray:
    """The value of a `crop_R` column: int32 (4,) of latents, float32 (crops, 4) of tokens.

    Args:
        kind: latents or tokens.
        boxes: (left, top, right, bottom) of each crop, in pixels of the original image.
    """
    return np.asarray(boxes[0], np.int32) if kind == "latents" else np.asarray(boxes, np.float32)
