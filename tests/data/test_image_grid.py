"""Grids: where each picture lies, and that a file is whole or not there."""

import numpy as np
import pytest
import torch
from PIL import Image

from data.image_grid import cut_grid, picture_grid, save_png, to_uint8

MARGIN = 6


def plain(count, height=8, width=8):
    """Pictures of one colour each, their number times ten."""
    return np.stack([np.full((height, width, 3), 10 * (i + 1), dtype=np.uint8) for i in range(count)])


def text_height(lines):
    return 13 * lines + 6


@pytest.mark.parametrize(
    ("count", "columns", "shape"),
    [(5, 3, (2, 3)), (5, None, (2, 3)), (4, None, (2, 2)), (1, None, (1, 1)), (2, 8, (1, 8))],
)
def test_geometry(count, columns, shape):
    sheet = picture_grid(plain(count), ["x"] * count, columns, cell=8)
    rows, wide = shape
    down = 8 + text_height(1) + MARGIN
    assert sheet.size == (wide * (8 + MARGIN) + MARGIN, rows * down + MARGIN)
    pixels = np.asarray(sheet)
    for number in range(count):
        row, column = divmod(number, wide)
        top, left = MARGIN + row * down, MARGIN + column * (8 + MARGIN)
        assert (pixels[top : top + 8, left : left + 8] == 10 * (number + 1)).all()
        assert (pixels[top - 1, left : left + 8] == 255).all() and (pixels[top : top + 8, left - 1] == 255).all()
        below = pixels[top + 8 : top + 8 + text_height(1), left : left + 8]
        assert below.min() < 200  # the caption


def test_small_pictures_are_enlarged_by_a_whole_factor():
    picture = np.zeros((1, 3, 4, 3), dtype=np.uint8)
    picture[0, 1, 2] = 200
    sheet = np.asarray(picture_grid(picture, [""], cell=8))
    assert sheet.shape == (9 + text_height(1) + 2 * MARGIN, 12 + 2 * MARGIN, 3)
    assert (sheet[MARGIN + 3 : MARGIN + 6, MARGIN + 6 : MARGIN + 9] == 200).all()
    assert (sheet[MARGIN : MARGIN + 9, MARGIN : MARGIN + 12] == 200).sum() == 27
    large = picture_grid(plain(1, 40, 60), [""], cell=8)
    assert large.size == (60 + 2 * MARGIN, 40 + text_height(1) + 2 * MARGIN)


def test_long_captions_take_three_lines_at_most():
    heights = [picture_grid(plain(1), ["word " * n], cell=64).size[1] for n in (1, 20, 200)]
    assert heights[1] == heights[2] == heights[0] + 2 * 13


@pytest.mark.parametrize("captions", [[], ["a"], ["a", "b", "c"]])
def test_every_picture_has_a_caption(captions):
    with pytest.raises(ValueError, match=f"2 pictures with {len(captions)} captions"):
        picture_grid(plain(2), captions)
    with pytest.raises(ValueError, match="0 pictures with 0 captions"):
        picture_grid(plain(1)[:0], [])


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    sheet = picture_grid(plain(1), ["x"])
    save_png(sheet, tmp_path / "deep" / "grid.png")
    with Image.open(tmp_path / "deep" / "grid.png") as image:
        assert image.format == "PNG" and (np.asarray(image) == np.asarray(sheet)).all()

    def fail(self, path, format):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_png(sheet, tmp_path / "deep" / "grid.png")
    with Image.open(tmp_path / "deep" / "grid.png") as image:
        assert image.size == sheet.size


def test_numbers_become_bytes():
    values = torch.tensor([-0.5, 0.0, 0.5, 1.0, 1.5]).reshape(1, 1, 1, 5).expand(2, 3, 4, 5)
    made = to_uint8(values)
    assert made.shape == (2, 4, 5, 3) and made.dtype == np.uint8
    assert made[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("columns", [None, 2, 7])
def test_a_sheet_is_cut_into_its_images(columns):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (5, 40, 48, 3), dtype=np.uint8)
    captions = ["", "b", "a long caption that has to be wrapped to several lines", "d", "e"]
    sheet = picture_grid(pictures, captions, columns)
    cut = np.stack([np.asarray(image) for image in cut_grid(sheet, captions, columns)])
    assert np.array_equal(cut, pictures.repeat(4, 1).repeat(4, 2))
    assert cut_grid(sheet.crop((0, 0, sheet.width - 1, sheet.height)), captions, columns) is None
    assert cut_grid(sheet, [], columns) is None
