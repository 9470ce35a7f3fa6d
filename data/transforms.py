"""Crops and resizes upright images to squares, with one resampling step."""

import math
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.crops import CROPS, LARGEST, Box
from data.sources.filters import JPEG_SCALES

Crop = Literal["center", "random", "dvae", "transformer"]


def side_needed(resolution: int, crop: Crop) -> int:
    """The least side in pixels that a decode at reduced size must leave, for a crop of R x R pixels."""
    return round(LARGEST * resolution) if crop in CROPS else resolution


def crop_box(size: tuple[int, int], resolution: int, crop: Crop, rng: np.random.Generator | None = None) -> Box:
    """A square inside an image: (left, top, right, bottom) in its pixels.

    "center" and "random" take the largest square, the same for every resolution: resizing it to R x R is the same as
    resizing the shorter side to R and cropping R x R from that, but for the border's pixels, and for a shift of up to a
    pixel where that rounds the longer side and the position of the crop. The others are those of `data.crops`.

    Args:
        size: (width, height) in pixels.
        resolution: R, in pixels.
        crop: "center"; "random" for a position drawn uniformly; or the name of one of `CROPS`.
        rng: random generator; "center" needs none.

    Raises:
        ValueError: an unknown `crop`, or "random" without `rng`.
    """
    if crop in CROPS:
        return CROPS[crop](size, resolution, rng)
    width, height = size
    side = min(width, height)
    spare_x, spare_y = width - side, height - side
    if crop == "center":
        left, top = spare_x // 2, spare_y // 2
    elif crop == "random":
        if rng is None:
            raise ValueError('crop "random" needs a random generator: pass rng=numpy.random.default_rng(seed)')
        left, top = int(rng.integers(spare_x + 1)), int(rng.integers(spare_y + 1))
    else:
        raise ValueError(f'crop is {crop!r}: give "center" or "random"')
    return left, top, left + side, top + side


def resize(
    image: np.ndarray,
    box: Box,
    resolution: int,
    original_size: tuple[int, int] | None = None,
    area: bool = False,
) -> np.ndarray:
    """Resamples a square of an image, in one step.

    Args:
        image: uint8 (H, W, 3), RGB; a JPEG may have been decoded at a fraction of `original_size` (see
            `data.sources.filters`).
        box: (left, top, right, bottom) of the square, in pixels of `original_size`; may be fractional.
        resolution: side of the result in pixels.
        original_size: (width, height) that `box` refers to; the image's own if None.
        area: resample by `area_average` instead of `bicubic`.

    Returns:
        uint8 (resolution, resolution, 3).
    """
    # The sides of a JPEG that is decoded at a fraction are rounded up: their quotient is not quite the fraction.
    size = image.shape[1], image.shape[0]
    sides = list(zip(original_size or size, size, strict=True))
    scale = next(scale for scale in JPEG_SCALES if all(-(-whole // scale) <= part for whole, part in sides))
    scaled = tuple(edge / scale for edge in box)
    return (area_average if area else bicubic)(image, scaled, resolution)


def bicubic(image: np.ndarray, box: Box, resolution: int) -> np.ndarray:
    """Resamples by the antialiased bicubic filter (a = -0.5): its support grows with the input pixels per output pixel.

    It is Pillow's filter, computed by PyTorch where the box lies on whole pixels: PyTorch uses AVX2, and gives the same
    bytes on processors without it. Pixels outside of the box do not count.

    Args:
        image: uint8 (H, W, 3).
        box: (left, top, right, bottom) within the image, in its pixels; may be fractional.
        resolution: side of the result in pixels.

    Returns:
        uint8 (resolution, resolution, 3), rounded after each of the two directions.
    """
    left, top, right, bottom = box
    whole = (math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom))
    square, size = image[whole[1] : whole[3], whole[0] : whole[2]], (resolution, resolution)
    if whole != tuple(box):  # only in a JPEG that was decoded at a fraction
        inside = (left - whole[0], top - whole[1], right - whole[0], bottom - whole[1])
        return np.asarray(Image.fromarray(square).resize(size, Image.Resampling.BICUBIC, box=inside))
    # In this order, which gives the strides of a batch in channels_last: the result has them, too, and is not permuted.
    pixels = torch.from_numpy(np.ascontiguousarray(square))[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def area_average(image: np.ndarray, box: Box, resolution: int) -> np.ndarray:
    """Resamples by area averaging: input pixels count by the part of them that an output pixel covers.

    Pillow's box filter takes whole input pixels. Between 1 and 1.5 input pixels per output pixel, where DALL-E's crops
    are, most of its output pixels are copies of one of them.

    Args:
        image: uint8 (H, W, 3).
        box: (left, top, right, bottom) within the image, in its pixels; may be fractional.
        resolution: side of the result in pixels.

    Returns:
        uint8 (resolution, resolution, 3), rounded once.
    """
    left, top, right, bottom = box
    x, y = int(left), int(top)
    pixels = torch.from_numpy(image[y : math.ceil(bottom), x : math.ceil(right)])
    height, width, channels = pixels.shape
    rows = _mean_rows(pixels.float().reshape(height, width * channels), top - y, bottom - y, resolution)
    columns = rows.view(resolution, width, channels).transpose(0, 1).reshape(width, resolution * channels)
    square = _mean_rows(columns, left - x, right - x, resolution).view(resolution, resolution, channels)
    return square.round().to(torch.uint8).transpose(0, 1).contiguous().numpy()


def _mean_rows(values: Tensor, first: float, last: float, count: int) -> Tensor:
    """Means of `count` equal parts of the rows from `first` to `last`, which may be fractional.

    Args:
        values: float32 (N, M).

    Returns:
        float32 (count, M).
    """
    edges = np.linspace(first, last, count + 1)
    low, high = edges[:-1, None], edges[1:, None]
    size = (last - first) / count
    rows = low.astype(np.int64) + np.arange(math.ceil(size) + 1)  # a part covers so many at most
    covered = np.clip(np.minimum(high, rows + 1) - np.maximum(low, rows), 0, None)
    weights = torch.from_numpy((covered / size).astype(np.float32))
    inside = torch.from_numpy(np.minimum(rows, len(values) - 1))
    return torch.nn.functional.embedding_bag(inside, values, mode="sum", per_sample_weights=weights)


def resize_and_crop(
    image: np.ndarray,
    resolution: int,
    crop: Crop = "center",
    rng: np.random.Generator | None = None,
    original_size: tuple[int, int] | None = None,
) -> np.ndarray:
    """Crops a square and resizes it, in one resampling step; DALL-E's crops by area averaging.

    Args:
        image: uint8 (H, W, 3), RGB, upright.
        resolution: side of the result in pixels.
        crop, rng: see `crop_box`.
        original_size: (width, height) before decoding at reduced size; the image's own if None.

    Returns:
        uint8 (resolution, resolution, 3).

    Raises:
        ValueError: as `crop_box`, or `resolution` below 1.
    """
    if resolution < 1:
        raise ValueError(f"resolution is {resolution}: give 1 or more pixels")
    box = crop_box(original_size or (image.shape[1], image.shape[0]), resolution, crop, rng)
    return resize(image, box, resolution, original_size, area=crop in CROPS)
