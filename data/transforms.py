"""From an upright picture to a square of pixels: one crop box, one resample."""

from typing import Literal

import numpy as np
from PIL import Image

Crop = Literal["center", "random"]
Box = tuple[int, int, int, int]

# Before the Lanczos filter, the picture is averaged over whole pixels down to this many times the wanted
# size. Pillow calls 3 "almost indistinguishable" from filtering every pixel; it is several times faster on
# photographs.
REDUCING_GAP = 3.0


def crop_box(size: tuple[int, int], crop: Crop, rng: np.random.Generator | None = None) -> Box:
    """The largest square inside a picture: (left, top, right, bottom) in its pixels.

    Resizing it to R x R is the same as resizing the shorter side to R and cropping R x R from that.

    Args:
        size: (width, height) in pixels.
        crop: "center", or "random" for a place drawn uniformly.
        rng: where "random" draws from.

    Raises:
        ValueError: an unknown `crop`, or "random" without `rng`.
    """
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
    image: Image.Image,
    box: tuple[float, float, float, float],
    resolution: int,
    original_size: tuple[int, int] | None = None,
    area: bool = False,
) -> np.ndarray:
    """Resamples a square of a picture, in one step.

    Args:
        image: RGB; may have been decoded at a fraction of `original_size`.
        box: the square, in pixels of `original_size`; may have fractions.
        resolution: side of the result in pixels.
        original_size: (width, height) that `box` refers to; the image's own if None.
        area: each pixel is the mean of those whose centres it covers, instead of Lanczos' filter.

    Returns:
        uint8 (resolution, resolution, 3).
    """
    width, height = original_size or image.size
    scale_x, scale_y = image.width / width, image.height / height
    left, top, right, bottom = box
    # The minimum: a float product may end a hair outside of the picture, which Pillow refuses.
    scaled = (
        left * scale_x,
        top * scale_y,
        min(right * scale_x, image.width),
        min(bottom * scale_y, image.height),
    )
    wanted = (resolution, resolution)
    if area:
        square = image.resize(wanted, Image.Resampling.BOX, box=scaled)
    else:
        square = image.resize(wanted, Image.Resampling.LANCZOS, box=scaled, reducing_gap=REDUCING_GAP)
    return np.asarray(square)


def resize_and_crop(
    image: Image.Image,
    resolution: int,
    crop: Crop = "center",
    rng: np.random.Generator | None = None,
    original_size: tuple[int, int] | None = None,
) -> tuple[np.ndarray, Box]:
    """Shorter side to `resolution`, then a square crop, in one resample.

    For several resolutions of one crop, call `crop_box` once and `resize` for each.

    Args:
        image: RGB, upright.
        resolution: side of the result in pixels.
        crop: "center" or "random".
        rng: where "random" draws from.
        original_size: (width, height) before a reduced decode; the image's own if None.

    Returns:
        uint8 (resolution, resolution, 3), and the crop box in pixels of the original picture.
        `is_upscaled(box, resolution)` tells whether the result has more pixels than the original had there.

    Raises:
        ValueError: as `crop_box`, or `resolution` below 1.
    """
    if resolution < 1:
        raise ValueError(f"resolution is {resolution}: give 1 or more pixels")
    box = crop_box(original_size or image.size, crop, rng)
    return resize(image, box, resolution, original_size), box


def is_upscaled(box: Box, resolution: int) -> bool:
    """Whether a crop was enlarged: the box (original pixels) is smaller than the result."""
    return box[2] - box[0] < resolution
