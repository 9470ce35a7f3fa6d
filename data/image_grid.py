"""Grids of images with captions, to look at."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.system.files import atomic_write

FONT_SIZE = 11
LINE_HEIGHT = 13
MARGIN = 6  # pixels around cells


def picture_grid(pictures: np.ndarray, captions: list[str], columns: int | None = None, cell: int = 128) -> Image.Image:
    """Arranges images in rows, with each caption below its image.

    Args:
        pictures: (N, H, W, 3) uint8.
        captions: N texts, which are wrapped to the width of an image and cut after three lines.
        columns: number of images per row; None for a grid that is nearly square.
        cell: minimum side of an image in pixels. Smaller images are enlarged by an integer factor.

    Raises:
        ValueError: there is no image, or another number of captions.
    """
    if len(pictures) == 0 or len(pictures) != len(captions):
        raise ValueError(f"picture_grid: {len(pictures)} pictures with {len(captions)} captions")
    factor = max(1, math.ceil(cell / pictures.shape[1]))
    height, width = pictures.shape[1] * factor, pictures.shape[2] * factor
    columns = columns or _square(len(pictures))
    rows = math.ceil(len(pictures) / columns)
    font = ImageFont.load_default(FONT_SIZE)
    lines, text_height = _wrapped(captions, width)
    sheet = Image.new(
        "RGB", (columns * (width + MARGIN) + MARGIN, rows * (height + text_height + MARGIN) + MARGIN), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        left, top = MARGIN + column * (width + MARGIN), MARGIN + row * (height + text_height + MARGIN)
        sheet.paste(Image.fromarray(picture).resize((width, height), Image.Resampling.NEAREST), (left, top))
        for place, line in enumerate(lines[number]):
            draw.text((left, top + height + 2 + place * LINE_HEIGHT), line, fill="black", font=font)
    return sheet


def cut_grid(sheet: Image.Image, captions: list[str], columns: int | None = None) -> list[Image.Image] | None:
    """The images of a sheet that `picture_grid` made, enlarged as they are there, without their captions.

    Args:
        sheet: the sheet.
        captions: N, those that it was made with.
        columns: as it was made with.

    Returns:
        N images; None if the sheet has not the size of one with these captions.
    """
    if not captions:
        return None
    columns = columns or _square(len(captions))
    width, rest = divmod(sheet.width - MARGIN, columns)
    row, rest_of_rows = divmod(sheet.height - MARGIN, math.ceil(len(captions) / columns))
    width -= MARGIN
    height = row - MARGIN - _wrapped(captions, width)[1]
    if rest or rest_of_rows or width < 1 or height < 1:
        return None
    corners = [
        (MARGIN + column * (width + MARGIN), MARGIN + line * row)
        for line, column in (divmod(number, columns) for number in range(len(captions)))
    ]
    return [sheet.crop((left, top, left + width, top + height)) for left, top in corners]


def _square(number: int) -> int:
    """Columns of a grid that is nearly square."""
    return math.ceil(math.sqrt(number))


def _wrapped(captions: list[str], width: int) -> tuple[list[list[str]], int]:
    """The lines of captions below images of a width in pixels, and the height of the largest caption in pixels."""
    lines = [textwrap.wrap(caption, max(8, int(width / (FONT_SIZE * 0.52))))[:3] for caption in captions]
    return lines, LINE_HEIGHT * max(1, *(len(line) for line in lines)) + 6


def save_png(picture: Image.Image, path: Path) -> None:
    """Writes a PNG atomically."""
    with atomic_write(path) as partial:
        picture.save(partial, format="PNG")


def to_uint8(images: Any) -> np.ndarray:
    """Converts a tensor (N, 3, H, W) in [0, 1] on any device to an array (N, H, W, 3) uint8."""
    return (images.float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
