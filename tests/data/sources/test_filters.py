"""data/sources/filters.py: awkward pictures come out upright and RGB; bad ones are named with a reason."""

import io
import re
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from data.sources.base import DecodedSample, Rejected, Sample
from data.sources.filters import Filter, decoded, judged
from data.system.errors import WrongResult

RED, BLUE = (220, 20, 30), (20, 30, 220)


def two_tone(width: int = 40, height: int = 20) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode(image, caption: str = "a caption", shrink_to: int | None = None, **bounds):
    return Filter(**bounds).decode(Sample("k", image, caption), shrink_to)


def near(pixel, colour, tolerance: int = 12) -> bool:
    return all(abs(a - b) <= tolerance for a, b in zip(pixel, colour, strict=True))


def corners(decoded) -> tuple:
    assert isinstance(decoded, DecodedSample), decoded
    assert decoded.image.dtype == np.uint8 and decoded.image.shape[2] == 3
    return tuple(decoded.image[1, 1].tolist()), tuple(decoded.image[1, -2].tolist())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {"quality": 95}),
        ("JPEG", {"quality": 95, "progressive": True}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("AVIF", {"quality": 95}),
    ],
)
def test_every_format(kind, options):
    left, right = corners(decode(encode(two_tone(), kind, **options)))
    assert near(left, RED) and near(right, BLUE)


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK", "YCbCr"])
def test_colour_modes(mode):
    image = two_tone().quantize(4) if mode == "P" else two_tone().convert(mode)
    left, right = corners(decode(encode(image, "PNG" if mode in ("RGBA", "P") else "JPEG", quality=95)))
    assert near(left, RED) and near(right, BLUE)


@pytest.mark.parametrize("mode", ["L", "1", "LA", "I;16", "I;16B"])
def test_grey_modes(mode):
    values = np.full((20, 40), 51, np.uint16)
    values[:, 20:] = 204
    if mode == "1":
        values = np.where(values > 100, 255, 0).astype(np.uint16)
    if mode.startswith("I;16"):
        image = Image.fromarray(values * 257)
        data = encode(image, "TIFF") if mode == "I;16B" else encode(image)
    else:
        data = encode(Image.fromarray(values.astype(np.uint8)).convert(mode))
    left, right = corners(decode(data))
    assert left == (values[0, 0],) * 3 and right == (values[0, -1],) * 3


def test_sixteen_bit_grey_is_scaled_and_not_cut():
    left, right = corners(decode(encode(Image.fromarray(np.full((8, 8), 1000, np.uint16)))))
    assert left == right == (4, 4, 4)


def test_transparency_is_on_white():
    image = two_tone().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size).point(lambda value: 255 if value > 127 else 0))
    left, _ = corners(decode(encode(image)))
    assert left == (255, 255, 255)
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, *RED])
    palette.paste(1, (4, 0, 8, 8))
    left, right = corners(decode(encode(palette, transparency=0)))
    assert left == (255, 255, 255) and right == RED
    keyed = encode(two_tone(), transparency=BLUE)  # RGB with one colour declared transparent
    left, right = corners(decode(keyed))
    assert left == RED and right == (255, 255, 255)


def test_sixteen_bit_grey_with_a_transparent_value_is_on_white():
    values = np.full((8, 8), 1000, np.uint16)
    values[:, 4:] = 51 * 257
    left, right = corners(decode(encode(Image.fromarray(values), transparency=1000)))
    assert left == (255, 255, 255) and right == (51, 51, 51)


def test_half_transparency_is_mixed():
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 128))
    assert near(corners(decode(encode(image)))[0], (127, 127, 127), 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_every_pixel_is_where_pillow_puts_it(orientation, kind):
    """All four quarters differ, so that no two orientations look the same."""
    exif = Image.Exif()
    exif[274] = orientation
    quarters = Image.new("RGB", (32, 16), RED)
    for place, colour in (((16, 0, 32, 8), BLUE), ((0, 8, 16, 16), (10, 200, 30)), ((16, 8, 32, 16), (250, 250, 250))):
        quarters.paste(colour, place)
    data = encode(quarters, kind, exif=exif)
    assert np.array_equal(decode(data).image, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_damaged_exif_block_costs_no_image(kind):
    whole = decode(encode(two_tone(), kind))
    found = decode(encode(two_tone(), kind, exif=b"Exif\0\0no header of TIFF"))
    assert isinstance(found, DecodedSample) and np.array_equal(found.image, whole.image)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(orientation, kind):
    upright = two_tone()
    stored = {
        1: [],
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }[orientation]
    image = upright
    for step in stored:
        image = image.transpose(step)
    exif = Image.Exif()
    exif[274] = orientation
    decoded = decode(encode(image, kind, exif=exif), min_aspect=1.9, max_aspect=2.1)
    left, right = corners(decoded)
    assert near(left, RED, 25) and near(right, BLUE, 25)
    assert decoded.original_size == (40, 20) and decoded.image.shape == (20, 40, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_no_harm():
    data = encode(two_tone(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\xff\xff\xff", quality=95)
    left, _ = corners(decode(data))
    assert near(left, RED)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE, (0, 255, 0))]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
    assert near(corners(decode(data))[0], RED)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_truncated(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    data = encode(noise, kind)
    rejected = decode(data[: len(data) // 2])
    assert isinstance(rejected, Rejected) and rejected.reason == "broken_image"


@pytest.mark.parametrize("data", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_not_a_picture(data):
    assert decode(data).reason == "broken_image"


@settings(max_examples=60)
@given(st.data())
def test_damaged_bytes_never_raise(data):
    good = encode(two_tone(), data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "TIFF"])))
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert isinstance(decode(bytes(raw), max_pixels=10_000), DecodedSample | Rejected)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises width x height pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [9_500, 12_000, 60_000])
def test_bombs_are_refused_by_their_header(side):
    assert decode(bomb(side, side)).reason == "too_many_pixels"


@pytest.mark.parametrize("action", ["always", "error"])
def test_warnings_of_pillow_are_not_heard(action):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter(action)
        assert decode(bomb(10_000, 10_000)).detail == "10000x10000"
    assert not heard


def test_sizes_and_aspect():
    data = encode(two_tone(40, 20))
    assert decode(data, min_side=20, max_pixels=800, min_aspect=2.0, max_aspect=2.0).original_size == (40, 20)
    assert decode(data, min_side=21).reason == "too_small"
    assert decode(data, max_pixels=799).reason == "too_many_pixels"
    assert decode(data, max_aspect=1.99).reason == "aspect"
    assert decode(data, min_aspect=2.01).reason == "aspect"
    assert decode(two_tone(40, 20), max_aspect=1.99).reason == "aspect"  # a picture that is decoded already


def test_captions():
    data = encode(two_tone())
    assert decode(data, " \n\t ").reason == "empty_caption"
    assert decode(data, " ab ", min_caption_chars=3).reason == "short_caption"
    assert decode(data, " abcd ", max_caption_chars=3).reason == "long_caption"
    assert decode(data, " abc \n", min_caption_chars=3, max_caption_chars=3).caption == "abc"


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range(mode):
    assert decode(Image.new(mode, (8, 8))).reason == "unsupported_image"


def test_large_jpeg_is_decoded_at_a_fraction():
    data = encode(two_tone(1600, 1200), "JPEG")
    assert decode(data).image.shape == (1200, 1600, 3)
    small = decode(data, shrink_to=64)
    assert small.original_size == (1600, 1200) and small.image.shape == (150, 200, 3)
    exif = Image.Exif()
    exif[274] = 6
    turned = decode(encode(two_tone(1600, 1200), "JPEG", exif=exif), shrink_to=64)
    assert turned.original_size == (1200, 1600) and turned.image.shape == (200, 150, 3)
    assert decode(encode(two_tone(100, 90), "JPEG"), shrink_to=64).image.shape == (90, 100, 3)
    # The last pixels stand for less than the others, and would come first in a picture that is turned.
    data = encode(two_tone(1601, 1200), "JPEG", exif=exif)
    assert decode(data, shrink_to=64).image.shape == (1601, 1200, 3)
    assert decode(encode(two_tone(1601, 1200), "JPEG"), shrink_to=64).image.shape == (150, 201, 3)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_side": 0}, "min_side"),
        ({"min_side": 100, "max_pixels": 99}, "min_side"),
        ({"max_pixels": 10**10}, "max_pixels"),
        ({"min_aspect": 2.0, "max_aspect": 1.0}, "min_aspect"),
        ({"max_aspect": 0.0}, "max_aspect"),
        ({"min_caption_chars": 0}, "min_caption_chars"),
        ({"min_caption_chars": 9, "max_caption_chars": 5}, "max_caption_chars"),
    ],
)
def test_bounds_nothing_can_meet(bounds, message):
    with pytest.raises(ValueError, match=f"filter.*{message}"):
        Filter(**bounds)


def test_a_picture_whose_orientation_lacks_memory_is_not_taken_as_it_lies(monkeypatch):
    monkeypatch.setattr(Image.Image, "getexif", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        decode(encode(two_tone()))


@pytest.mark.parametrize(
    "found, message",
    [
        (None, "returns None; return a DecodedSample, or a Rejected with a reason"),
        (False, "returns False; return a DecodedSample, or a Rejected with a reason"),
        ("too_small", "returns 'too_small'; return a DecodedSample, or a Rejected with a reason"),
        (np.zeros((4, 4, 3), np.float32), "returns the image float32 (4, 4, 3) instead of an array uint8"),
        (np.zeros((4, 4), np.uint8), "returns the image uint8 (4, 4) instead of an array uint8"),
        (Image.new("RGB", (4, 4)), "returns the image a value of type Image instead of an array uint8"),
        (DecodedSample("k", np.zeros((4, 4, 3), np.uint8), "\ud800", (4, 4)), "returns the caption '\\ud800', which"),
    ],
)
def test_what_a_filter_returns_is_checked(found, message):
    """Images of floats from 0 to 1 became black ones without a word, and what is no sample ended in an AssertionError,
    or, in training and in scores, was left out."""
    if isinstance(found, np.ndarray | Image.Image):
        found = DecodedSample("k", found, "text", (4, 4))
    mine = SimpleNamespace(decode=lambda sample, shrink_to: found)
    with pytest.raises(WrongResult, match=re.escape(f"SimpleNamespace.decode() of the sample 'k' {message}")):
        decoded(mine, Sample("k", b"", "text"), 4)


def test_what_a_filter_makes_of_a_caption_is_checked():
    sample, reason = Sample("k", b"", " text "), Rejected("k", "boilerplate")
    assert judged(Filter(), sample) == "text"
    assert judged(SimpleNamespace(caption=lambda sample: reason), sample) == reason
    with pytest.raises(WrongResult, match=re.escape("SimpleNamespace.caption() of the sample 'k' returns False")):
        judged(SimpleNamespace(caption=lambda sample: False), sample)
    with pytest.raises(WrongResult, match="of the sample 'k' returns .*, which is no text; drop its lone surrogates"):
        judged(SimpleNamespace(caption=lambda sample: "\ud800"), sample)


@pytest.mark.parametrize("error", [KeyError("aesthetics"), ValueError("mine: a score of 11")])
def test_an_error_of_a_filter_names_the_sample(error):
    """Of a set of millions, nobody could tell which one it was."""

    def fail(*_):
        raise error

    mine, sample = SimpleNamespace(decode=fail, caption=fail), Sample("k", b"", "text")
    for call in decoded, judged:
        with pytest.raises(type(error)):
            call(mine, sample)
    assert error.__notes__ == [f"SimpleNamespace.{name}() of the sample 'k'" for name in ("decode", "caption")]


def test_lines_of_workers_get_no_note():
    """Only the last line of what PyTorch makes of them is shown, which would be the note."""
    inner = SimpleNamespace(decode=lambda sample, shrink_to: None)
    outer = SimpleNamespace(decode=lambda sample, shrink_to: decoded(inner, sample))  # as a filter that wraps another
    with pytest.raises(WrongResult) as raised:
        decoded(outer, Sample("k", b"", ""))
    assert not hasattr(raised.value, "__notes__")
