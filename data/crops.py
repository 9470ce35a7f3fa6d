"""The training crops of DALL-E (Ramesh et al. 2021, appendices A.2 and B.2), for `data.transforms.resize` to cut out.

Both take a large square of the image, resize it by area averaging to a side a little above R, and cut a random R x R
square out of the result. Cutting first and resizing once gives the same pixels at a lower cost. A crop is therefore one
box in pixels of the original image, with fractional coordinates. The images of the dVAE are also flipped at random.
Those of the transformer are not, because images may show text. The published program resizes with TensorFlow's
`align_corners`, which moves pixels by less than one. It is left out.
"""

from collections.abc import Callable

import numpy as np

# (left, top, right, bottom) in pixels of the image; may be fractional.
Box = tuple[float, float, float, float]
# Largest side that the square is resized to, in units of R. Decoding at reduced size must keep this many pixels.
LARGEST = 12 / 8


def dvae_crop(size: tuple[int, int], resolution: int, rng: np.random.Generator) -> Box:
    """A random square of the shorter side s, resized to min(s, 9/8 R) to min(s, 12/8 R), and a random R x R crop.

    Args:
        size: (width, height) in pixels.
        resolution: R, in pixels. Images whose shorter side is below R are enlarged; `filter.min_side` excludes them.
        rng: random generator.

    Returns:
        The box of the crop; `resize(image, box, resolution, size, area=True)` gives its pixels.
    """
    width, height = size
    square = min(size)
    left, top = (int(rng.integers(spare + 1)) for spare in (width - square, height - square))
    sides = (min(square, round(9 / 8 * resolution)), min(square, round(LARGEST * resolution)))
    return _cut(left, top, square, sides, resolution, rng)


def transformer_crop(size: tuple[int, int], resolution: int, rng: np.random.Generator) -> Box:
    """A square of the shorter side s near the middle, resized to between R and min(s, 9/8 R), and a random R x R crop.

    The square begins between 3/8 and 5/8 of the difference of the sides. See `dvae_crop` for arguments and result.
    """
    width, height = size
    square = min(size)
    left, top = (_near_middle(spare, rng) for spare in (width - square, height - square))
    return _cut(left, top, square, (resolution, min(square, round(9 / 8 * resolution))), resolution, rng)


def _near_middle(spare: int, rng: np.random.Generator) -> int:
    first = 3 * spare // 8
    return int(rng.integers(first, max(first + 1, 5 * spare // 8)))


def _cut(left: int, top: int, square: int, sides: tuple[int, int], resolution: int, rng: np.random.Generator) -> Box:
    """A random R x R crop of a square that is resized to a side in `sides` (inclusive), but to at least R."""
    least = max(sides[0], resolution)
    side = int(rng.integers(least, max(sides[1], least) + 1))
    x, y = (int(rng.integers(side - resolution + 1)) for _ in range(2))
    scale = square / side
    return left + x * scale, top + y * scale, left + (x + resolution) * scale, top + (y + resolution) * scale


CROPS: dict[str, Callable[[tuple[int, int], int, np.random.Generator], Box]] = {
    "dvae": dvae_crop,
    "transformer": transformer_crop,
}
