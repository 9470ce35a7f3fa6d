"""DALL-E's crops: their ranges by property, their pixels against resizing the whole square first."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from data.crops import CROPS, dvae_crop, transformer_crop
from data.transforms import area_average, resize

sides = st.integers(1, 3000)
resolutions = st.sampled_from([8, 32, 64, 256])
seeds = st.integers(0, 2**32 - 1)


def scale_of(box, size, resolution):
    """Side that the full square was resized to."""
    return min(size) * resolution / (box[2] - box[0])


@pytest.mark.parametrize("crop", CROPS.values())
@given(width=sides, height=sides, resolution=resolutions, seed=seeds)
def test_a_square_inside_of_the_picture(crop, width, height, resolution, seed):
    left, top, right, bottom = box = crop((width, height), resolution, np.random.default_rng(seed))
    assert right - left == pytest.approx(bottom - top, rel=1e-9)
    assert left >= 0 and top >= 0 and right <= width + 1e-6 and bottom <= height + 1e-6
    assert box == crop((width, height), resolution, np.random.default_rng(seed))
    if min(width, height) <= resolution:  # the whole square, enlarged
        assert right - left == pytest.approx(min(width, height))


@given(width=sides, height=sides, resolution=resolutions, seed=seeds)
def test_sizes(width, height, resolution, seed):
    short = min(width, height)
    assume(short >= resolution)
    rng = np.random.default_rng(seed)
    for crop, low, high in (
        (dvae_crop, min(short, round(resolution * 9 / 8)), min(short, round(resolution * 12 / 8))),
        (transformer_crop, resolution, min(short, round(resolution * 9 / 8))),
    ):
        side = scale_of(crop((width, height), resolution, rng), (width, height), resolution)
        assert low - 1e-6 <= side <= high + 1e-6 and side == pytest.approx(round(side))


@given(wide=st.booleans(), spare=st.integers(0, 500), seed=seeds)
def test_the_transformers_square_is_near_the_middle(wide, spare, seed):
    short, resolution = 300, 256
    size = (short + spare, short) if wide else (short, short + spare)
    box = transformer_crop(size, resolution, np.random.default_rng(seed))
    start, end = (box[0], box[2]) if wide else (box[1], box[3])
    assert 3 * spare // 8 <= start and end <= max(3 * spare // 8, 5 * spare // 8 - 1) + short + 1e-6


def test_everything_that_may_be_drawn_is():
    rng = np.random.default_rng(5)
    dvae = [dvae_crop((40, 20), 8, rng) for _ in range(4000)]
    assert {round(scale_of(box, (40, 20), 8)) for box in dvae} == {9, 10, 11, 12}
    whole = [box for box in dvae if round(scale_of(box, (40, 20), 8)) == 9]  # scale 20 / 9, offset 0 or 1 of them
    assert {round(box[1] * 9 / 20) for box in whole} == {0, 1}
    assert min(box[0] for box in dvae) == 0 and max(box[2] for box in dvae) == pytest.approx(40)
    transformer = [transformer_crop((40, 20), 8, rng) for _ in range(1000)]
    assert {round(scale_of(box, (40, 20), 8)) for box in transformer} == {8, 9}
    full = {box[0] for box in transformer if round(scale_of(box, (40, 20), 8)) == 8}
    assert full == {7, 8, 9, 10, 11}  # 3/8 of 20 to below 5/8 of 20, a whole number in the paper's program


def averaged(pixels, box, columns, rows):
    """Area averages of a box, by the part of each pixel (side 1) that each output pixel covers, in 64 bits."""

    def covered(first, last, count, size):
        edges, pixel = np.linspace(first, last, count + 1), np.arange(size)
        part = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
        return part.clip(0) / ((last - first) / count)

    height, width, _ = pixels.shape
    left, top, right, bottom = box
    return np.einsum("iy,yxc,jx->ijc", covered(top, bottom, rows, height), pixels, covered(left, right, columns, width))


@pytest.mark.parametrize("crop", CROPS.values())
def test_pixels_are_those_of_resizing_first(crop):
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for seed in range(20):
        box = crop((64, 64), 16, np.random.default_rng(seed))
        side = round(scale_of(box, (64, 64), 16))
        x, y = round(box[0] * side / 64), round(box[1] * side / 64)
        first = averaged(image, (0, 0, 64, 64), side, side)[y : y + 16, x : x + 16]
        made = resize(image, box, 16, area=True)
        assert np.abs(made - first).max() <= 0.5 + 1e-4  # rounded once; sums are 32-bit


@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 24))
def test_area_averaging_is_exact_for_any_box(data, width, height, resolution):
    """Also for boxes narrower than a pixel, boxes at the border, and results larger than the box."""
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    left, right = sorted(data.draw(st.tuples(st.floats(0, width), st.floats(0, width))))
    top, bottom = sorted(data.draw(st.tuples(st.floats(0, height), st.floats(0, height))))
    assume(right - left > 1e-3 and bottom - top > 1e-3)
    made = area_average(pixels, (left, top, right, bottom), resolution)
    exact = averaged(pixels, (left, top, right, bottom), resolution, resolution)
    assert np.abs(made - exact).max() <= 0.5 + 1e-3


def test_area_is_the_mean_of_what_is_covered():
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    made = resize(pixels, (4, 8, 20, 24), 4, area=True)
    means = pixels[8:24, 4:20].reshape(4, 4, 4, 4, 3).mean((1, 3))
    assert np.abs(made - means).max() <= 0.5 + 1e-4
    # The same square of a picture that was decoded at half its size.
    half = np.array(Image.fromarray(pixels).reduce(2))
    reduced = resize(half, (4, 8, 20, 24), 4, original_size=(32, 32), area=True)
    assert np.abs(reduced - means).max() <= 1.01  # rounded when it was halved, and now
