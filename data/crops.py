"""The training crops of DALL-E (Ramesh et al. 2021, appendices A.2 and B.2), for `data.transforms.resize` to cut out.

Both take a large square of the picture, resize it by area to a side a little above R, and cut a random R x R square
out of that. Cutting first and resizing once is the same and cheaper, so a crop is one box in the picture's own pixels,
with fractions. The dVAE's pictures are mirrored at random besides; the transformer's are not, for they hold text.
"""

from collections.abc import Callable

import numpy as np

# (left, top, right, bottom) in pixels of the picture, with fractions.
Box = tuple[float, float, float, float]
# Largest side that the square is resized to, in units of R: what a reduced decode must leave.
LARGEST = 12 / 8


def dvae_crop(size: tuple[int, int], resolution: int, rng: np.random.Generator) -> Box:
    """Any square of the shorter side s, resized to between min(s, 9/8 R) and min(s, 12/8 R), and any R x R of that.

    Args:
        size: (width, height) in pixels.
        resolution: R, in pixels. A picture whose shorter side is less is enlarged to it: filter.min_side keeps such
            pictures out.
        rng: where all of it is drawn from.

    Returns:
        A square; `resize(image, box, resolution, size, area=True)` makes the pixels.
    """
    width, height = size
    square = min(size)
    left, top = (int(rng.integers(spare + 1)) for spare in (width - square, height - square))
    sides = (min(square, round(9 / 8 * resolution)), min(square, round(LARGEST * resolution)))
    return _cut(left, top, square, sides, resolution, rng)


def transformer_crop(size: tuple[int, int], resolution: int, rng: np.random.Generator) -> Box:
    """A square of the shorter side s near the middle, resized to between R and min(s, 9/8 R), and any R x R of that.

    The square begins between 3/8 and 5/8 of what the longer side has to spare. Arguments and result as `dvae_crop`.
    """
    width, height = size
    square = min(size)
    left, top = (_near_middle(spare, rng) for spare in (width - square, height - square))
    return _cut(left, top, square, (resolution, min(square, round(9 / 8 * resolution))), resolution, rng)


def _near_middle(spare: int, rng: np.random.Generator) -> int:
    first = 3 * spare // 8
    return int(rng.integers(first, max(first + 1, 5 * spare // 8)))


def _cut(left: int, top: int, square: int, sides: tuple[int, int], resolution: int, rng: np.random.Generator) -> Box:
    """Any R x R square of a square that is resized to one of `sides` (both ends included), at least R."""
    least = max(sides[0], resolution)
    side = int(rng.integers(least, max(sides[1], least) + 1))
    x, y = (int(rng.integers(side - resolution + 1)) for _ in range(2))
    scale = square / side
    return left + x * scale, top + y * scale, left + (x + resolution) * scale, top + (y + resolution) * scale


CROPS: dict[str, Callable[[tuple[int, int], int, np.random.Generator], Box]] = {
    "dvae": dvae_crop,
    "transformer": transformer_crop,
}
