"""Images per second of a whole encode job: worker processes decode, both encoders encode, files are written."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.common.latent_sets import encode
from benchmarks.common.random_encoders import TEXTS, VAES, write_encoders
from benchmarks.encode_reading import write_tar
from benchmarks.gpu_run.context import Context
from precompute.encoding.progress import EncodeProgress

TABLE = "Encode job"
SPARE_CORES = 2  # for the process of the encoders, its writer included


def rates(context: Context, *, resolution: int, sizes: list[tuple[int, int]], images: int) -> None:
    """A row for each size of the images.

    Args:
        resolution: of the latents, in pixels.
        sizes: (width, height) of the images in pixels.
        images: number of images per row, in whole tars of 64.
    """
    encoders = "small" if context.small else "sd2"
    workers = max(1, (os.cpu_count() or 1) - SPARE_CORES)
    per_tar = 4 if context.small else 64
    for width, height in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "encoders").mkdir()
            write_encoders(VAES[encoders], TEXTS[encoders], folder / "encoders")
            (folder / "tars").mkdir()
            write_tar(folder / "tars" / "00000.tar", (width, height), per_tar)
            for number in range(1, images // per_tar):  # the same images: what they show makes no difference
                os.link(folder / "tars" / "00000.tar", folder / "tars" / f"{number:05d}.tar")
            seen = _run(context, folder, resolution, workers)
        values = {"image": f"{width}x{height}", "resolution": resolution, "workers": workers, **_rate(seen)}
        context.records.row(TABLE, values)
    context.records.note(
        TABLE, "JPEGs of noise with the spectrum of photographs, and random weights. The first half is not counted."
    )


def _run(context: Context, folder: Path, resolution: int, workers: int) -> list[tuple[float, int]]:
    """Runs the job. Returns (time in seconds, number of images until then) after each batch that was written."""
    seen: list[tuple[float, int]] = []
    update = EncodeProgress.update

    def noted(progress: EncodeProgress, images: int, rejected: int) -> None:
        update(progress, images, rejected)
        seen.append((time.monotonic(), progress.images))

    gpu, batch = context.device.type == "cuda", 2 if context.small else 64
    with patch.object(EncodeProgress, "update", noted):
        encode(folder, [resolution], gpu, upscale=context.small, batch=batch, workers=workers)
    return seen


def _rate(seen: list[tuple[float, int]]) -> dict[str, float | int]:
    """Of the second half: in the first, workers start and libraries choose their kernels."""
    half = next(moment for moment in seen if 2 * moment[1] >= seen[-1][1])
    seconds = seen[-1][0] - half[0]
    return {"images": seen[-1][1], "images/s": round((seen[-1][1] - half[1]) / seconds, 1) if seconds else 0.0}
