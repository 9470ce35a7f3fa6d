"""data/transforms.py: crop boxes and the single resample."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from data.sources.base import Sample
from data.sources.filters import Filter
from data.transforms import bicubic, crop_box, resize, resize_and_crop

ROOT = Path(__file__).resolve().parents[2]
sides = st.integers(1, 5000)


def smooth(width: int, height: int) -> Image.Image:
    """A picture whose colours say where a pixel was: red grows to the right, green to the bottom."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    waves = 127 + 120 * np.sin(x / 9) * np.cos(y / 13)
    return Image.fromarray(np.stack([x, y, waves], -1).astype(np.uint8))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = np.mean((a.astype(float) - b.astype(float)) ** 2)
    return 99.0 if error == 0 else 10 * np.log10(255**2 / error)


@given(width=sides, height=sides, crop=st.sampled_from(["center", "random"]), seed=st.integers(0, 2**32 - 1))
def test_box_is_the_largest_square_inside(width, height, crop, seed):
    left, top, right, bottom = crop_box((width, height), 8, crop, np.random.default_rng(seed))
    assert right - left == bottom - top == min(width, height)
    assert left >= 0 and top >= 0 and right <= width and bottom <= height


@given(width=sides, height=sides)
def test_center_is_central(width, height):
    left, top, right, bottom = crop_box((width, height), 8, "center")
    assert 0 <= (width - right) - left <= 1
    assert 0 <= (height - bottom) - top <= 1


def test_random_reaches_both_ends_and_follows_its_seed():
    rng = np.random.default_rng(1)
    lefts = {crop_box((13, 10), 8, "random", rng)[0] for _ in range(200)}
    assert lefts == {0, 1, 2, 3}
    boxes = [[crop_box((500, 300), 8, "random", np.random.default_rng(7)) for _ in range(3)] for _ in range(2)]
    assert boxes[0] == boxes[1]


@settings(max_examples=60)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    shrink=st.integers(1, 8),
    resolution=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_result_has_its_size_whatever_the_picture(width, height, shrink, resolution, seed):
    """Also where the picture was decoded at a fraction of its size: the box stays in original pixels."""
    image = np.full((-(-height // shrink), -(-width // shrink), 3), (10, 200, 30), np.uint8)
    array = resize_and_crop(image, resolution, "random", np.random.default_rng(seed), (width, height))
    assert array.shape == (resolution, resolution, 3) and array.dtype == np.uint8
    assert (array == (10, 200, 30)).all()


@pytest.mark.parametrize("size", [(900, 600), (600, 900), (601, 600)])
def test_one_step_equals_resize_then_crop(size):
    image = smooth(*size)
    array = resize_and_crop(np.array(image), 100)
    scale = 100 / min(size)
    whole = image.resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.BICUBIC)
    left, top = (whole.width - 100) // 2, (whole.height - 100) // 2
    assert psnr(array, np.asarray(whole.crop((left, top, left + 100, top + 100)))) > 36


def bicubic_weights(size: int, first: float, last: float, count: int) -> np.ndarray:
    """(count, size) float64: the weights of `size` pixels for `count` equal parts of [first, last], by definition."""
    scale = (last - first) / count
    centres = first + (np.arange(count) + 0.5) * scale
    x = np.abs(np.arange(size) + 0.5 - centres[:, None]) / max(scale, 1)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    return weights / weights.sum(1, keepdims=True)


@settings(max_examples=40, deadline=None)
@given(
    spare=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    place=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    side=st.integers(2, 120),
    cut=st.sampled_from([0, 0.25, 0.5]),
    resolution=st.integers(1, 90),
    seed=st.integers(0, 99),
)
def test_bicubic_equals_its_definition(spare, place, side, cut, resolution, seed):
    """Both directions round to whole numbers: the first by up to 1/2, to which the second applies its weights. Weights
    are integers of 16 bits or more, which adds less than 1/4. Values between 60 and 190 are not clipped in between."""
    values = np.random.default_rng(seed).integers(60, 190, (side + spare[1], side + spare[0], 3), np.uint8)
    left, top = (int(share * room) + cut for share, room in zip(place, spare, strict=True))
    box = (left, top, left + side - 2 * cut, top + side - 2 * cut)
    found = bicubic(values, box, resolution)
    inner = values[int(top) : int(top) + side, int(left) : int(left) + side].astype(float)
    weights = bicubic_weights(side, cut, side - cut, resolution)
    expected = np.einsum("iy,yxc,jx->ijc", weights, inner, weights, optimize=True)
    assert found.shape == (resolution, resolution, 3) and found.dtype == np.uint8 and found.flags.c_contiguous
    assert np.abs(found - expected).max() <= 0.5 + 0.5 * np.abs(weights).sum(1).max() + 0.25


RESIZED = """
import hashlib
import numpy as np
from data.transforms import resize_and_crop
pixels = np.random.default_rng(0).integers(0, 256, (97, 131, 3), np.uint8)
squares = [resize_and_crop(pixels, side).tobytes() for side in (16, 64, 97, 120)]
digest = hashlib.sha256(b"".join(squares)).hexdigest()
"""


def test_pixels_do_not_depend_on_the_processor():
    """PyTorch's kernel for processors without vector instructions gives the same bytes as the one in use."""
    here: dict = {}
    exec(RESIZED, here)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", RESIZED + "print(digest)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here["digest"]


def test_box_selects_what_it_says():
    array = resize(np.array(smooth(1000, 500)), (500, 0, 1000, 500), 50)
    assert array[:, 0, 0].mean() == pytest.approx(255 * 0.505, abs=4)
    assert array[:, -1, 0].mean() == pytest.approx(255 * 0.995, abs=4)


@pytest.mark.parametrize("size", [(1200, 904), (1033, 1025), (773, 2041)])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_reduced_decode_gives_the_same_crop(size, orientation):
    """Also where the reduced sides are rounded up."""
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[274] = orientation
    checks = np.indices(size[::-1]).sum(0) // 50 % 2 * 200  # edges all over the image
    picture = Image.fromarray(checks.astype(np.uint8)).filter(ImageFilter.BoxBlur(8)).convert("RGB")
    picture.save(buffer, "JPEG", quality=95, exif=exif)
    sample = Sample("k", buffer.getvalue(), "a caption")
    full, part = Filter().decode(sample), Filter().decode(sample, 128)
    assert part.original_size == full.image.shape[1::-1]
    rounded = orientation != 1 and any(side % 8 for side in size)
    assert (part.image.shape == full.image.shape) == rounded
    expected = resize_and_crop(full.image, 128)
    assert psnr(resize_and_crop(part.image, 128, original_size=part.original_size), expected) > 40
    box = (7.3, 5.1, 900.7, 898.5)
    expected = resize(full.image, box, 128, area=True)
    assert psnr(resize(part.image, box, 128, part.original_size, area=True), expected) > 40


def test_wrong_arguments_are_named():
    image = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(ValueError, match="needs a random generator"):
        resize_and_crop(image, 4, "random")
    with pytest.raises(ValueError, match="crop is 'middle'"):
        resize_and_crop(image, 4, "middle")
    with pytest.raises(ValueError, match="resolution is 0"):
        resize_and_crop(image, 0)
