"""data/sources/jpeg.py: the same bytes as Pillow, or None."""

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from data.sources import jpeg
from data.sources.base import Sample
from data.sources.filters import Filter, to_rgb
from tests.fuzzing import changed_bytes, few

KINDS = {
    "colour": ("RGB", {}),
    "colour in full resolution": ("RGB", {"subsampling": 0}),
    "colour in two halves": ("RGB", {"subsampling": 1}),
    "progressive": ("RGB", {"progressive": True}),
    "restarts": ("RGB", {"restart_marker_rows": 1}),
    "no luminance": ("RGB", {"keep_rgb": True}),
    "grey": ("L", {}),
}


def smooth(width: int, height: int, mode: str = "RGB") -> Image.Image:
    coarse = np.random.default_rng(width * height).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def stored(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def by_both(data: bytes, side: int | None = None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """By `decoded` and by Pillow; None where they do not decode it."""
    opened = [Image.open(io.BytesIO(data)) for _ in range(2)]
    if side is not None:
        for image in opened:
            image.draft(None, (side, side))
    found = jpeg.decoded(data, opened[0])
    try:
        opened[1].load()
    except Exception:
        return found, None
    return found, np.asarray(to_rgb(opened[1]))


@few
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from([None, 4, 9, 20]),
    st.integers(5, 100),
)
def test_the_same_bytes_as_pillow(kind, width, height, side, quality):
    """Also at a fraction of the size, whose sides are rounded up."""
    mode, options = KINDS[kind]
    found, expected = by_both(stored(smooth(width, height, mode), quality=quality, **options), side)
    assert found is not None and found.dtype == np.uint8 and np.array_equal(found, expected)


@few
@given(st.data())
def test_damaged_ones_are_left_to_pillow(data):
    """Nothing is taken that Pillow refuses, and what is taken has the same pixels."""
    mode, options = KINDS[data.draw(st.sampled_from(sorted(KINDS)))]
    changed = data.draw(changed_bytes(stored(smooth(40, 30, mode), **options)))
    try:
        found, expected = by_both(changed)
    except Exception:
        return  # not opened by Pillow, which a filter asks first
    assert found is None or np.array_equal(found, expected)


def test_inks_are_left_to_pillow():
    found, expected = by_both(stored(smooth(40, 30, "CMYK")))
    assert found is None and expected.shape == (30, 40, 3)


def test_the_first_of_several_images_is_decoded():
    buffer = io.BytesIO()
    smooth(40, 30).save(buffer, "MPO", save_all=True, append_images=[smooth(40, 24)])
    found, expected = by_both(buffer.getvalue())
    assert found.shape == (30, 40, 3) and np.array_equal(found, expected)


def test_no_memory_is_taken_for_a_size_that_pillow_did_not_read(monkeypatch):
    data = stored(smooth(40, 30))
    image = Image.open(io.BytesIO(stored(smooth(40, 31))))
    monkeypatch.setattr(simplejpeg, "decode_jpeg", None)
    assert jpeg.decoded(data, image) is None


@pytest.mark.parametrize("side", [None, 8])
def test_a_filter_uses_it(side, monkeypatch):
    """It would go on with Pillow, unnoticed, if this decoder took nothing."""
    data = stored(smooth(64, 48))
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    sample = Filter().decode(Sample("k", data, "a caption"), side)
    assert sample.original_size == (64, 48)
    assert sample.image.shape == ((48, 64, 3) if side is None else (24, 32, 3))
