"""The pictures that a run has drawn through training: the cells of its grids, by prompt."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from data.image_grid import cut_grid
from data.sources.filters import FORMATS
from data.system.disk_errors import about, disk_error
from data.system.log import log

GRIDS = ("sample_grid", "token_grid")  # callbacks that write grids of prompts
WHOLE = {"reconstructions": "Images and their reconstructions"}  # folder -> what its grids show


@dataclass(frozen=True)
class Picture:
    """A picture of a run.

    Attributes:
        batch: of the run when it was drawn.
        uri: the picture, as a data URI.
        size: width and height in pixels.
    """

    batch: int
    uri: str
    size: tuple[int, int]


def read_pictures(run: Path, config: Mapping[str, Any], most: int, side: int, end: float) -> dict[str, list[Picture]]:
    """What a run has drawn, over its course: prompt, or title of a grid -> pictures.

    Args:
        run: folder of the run.
        config: plain values of its config.
        most: number of grids that are taken, evenly over those that there are, the first and the last among them.
        side: largest side of a picture in pixels; of a whole grid, four times that.
        end: last batch of the run. Pictures of later ones are of batches that were lost, or of a run that was begun
            anew in the folder, and are left out.
    """
    found: dict[str, list[Picture]] = {}
    callbacks = config.get("callbacks")
    for callback in callbacks.values() if isinstance(callbacks, Mapping) else ():
        if isinstance(callback, Mapping) and callback.get("name") in GRIDS:
            prompts, columns = [str(prompt) for prompt in callback.get("prompts") or []], callback.get("columns")
            columns = columns if isinstance(columns, int) and columns > 0 else None
            for batch, grid in _grids(run / "samples", most, end):
                cells = cut_grid(grid, prompts, columns)
                if cells is None:
                    log.warning(f"{run}: the grid of batch {batch} is not one of the prompts in config.yaml; left out")
                    continue
                for prompt, cell in dict(zip(prompts, cells, strict=True)).items():
                    found.setdefault(prompt, []).append(_picture(batch, cell, side))
    for folder, title in WHOLE.items():
        pictures = [_picture(batch, grid, 4 * side) for batch, grid in _grids(run / folder, most, end)]
        found |= {title: pictures} if pictures else {}
    return found


def _grids(folder: Path, most: int, end: float) -> list[tuple[int, Image.Image]]:
    """(batch, grid), in the order of the batches, up to the last one of the run."""
    files = {int(m[1]): file for file in folder.glob("ba*.png") if (m := re.fullmatch(r"ba(\d+)\.png", file.name))}
    batches = sorted(batch for batch in files if batch <= end)
    if len(batches) > most:
        places = [round(i * (len(batches) - 1) / max(1, most - 1)) for i in range(most)]
        batches = [batches[place] for place in (places if most > 1 else [-1])]
    grids = []
    for batch in batches:
        try:
            with about(files[batch]), Image.open(files[batch], formats=FORMATS) as image:
                grids.append((batch, image.convert("RGB")))
        except MemoryError:  # for at most what Pillow takes for no bomb: the picture may be whole
            raise
        except Exception as error:  # on damaged files, Pillow's decoders raise almost anything
            if disk_error(error) is not None:  # the picture may be whole
                raise
            raise ValueError(f"{files[batch]}: not readable as a picture ({error}); delete it") from None
    return grids


def _picture(batch: int, image: Image.Image, side: int) -> Picture:
    image = image.copy()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)  # never enlarges
    out = io.BytesIO()
    image.save(out, "WEBP", quality=90)
    return Picture(batch, f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}", image.size)
