"""Images per second and core that are read, decoded and resized, as the workers of an encode job do: alternatives.

The same tars of JPEGs are read by this project's code, by webdataset with torchvision's functions for Pillow images
(the usual way), and by webdataset with torchvision's decoder and functions for tensors. All of them take the central
square and resize it by a bicubic filter with antialiasing. DALL-E's crops, four per image and averaged by area, are
this project's alone.

    python benchmarks/encode_reading.py                     # two minutes, 60 MB in the temporary folder
    python benchmarks/encode_reading.py --sizes 4000x3000 --resolutions 256 512

- A rate is images over CPU seconds of this process, which has one thread: the median over the rounds, in which readers
  take turns. It holds on a machine that does nothing else; programs that share its caches change it.
- There are no photographs here: images are noise whose amplitude falls with the frequency (1 / f^1.2, as that of
  photographs does about), at JPEG quality 85. The table says how many bytes they have per pixel. The more, the longer
  decoding takes.
- Captions are not tokenized.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import io
import re
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import InterpolationMode, functional

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from data.sources.base import InputShard
from data.sources.filters import Filter
from data.sources.tars import TarSource
from precompute.checking.reencode import psnr
from precompute.encoding.decode import DecodedBatches, Preparation

OURS = "this project"
DALLE = "this project, four of DALL-E's crops"
BATCH = 16
ALIKE = 40.0  # dB: readers whose images differ by more do not do the same


def photograph(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Noise with the spectrum of a photograph: brightness, and colours that vary less."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    amplitude = 1 / np.maximum(frequency, 1 / max(width, height)) ** 1.2

    def noise() -> np.ndarray:
        values = np.fft.irfft2(amplitude * np.exp(2j * np.pi * rng.random(amplitude.shape)), (height, width))
        return values / values.std()

    brightness = noise()
    pixels = np.stack([brightness + 0.35 * noise() for _ in range(3)], -1)
    return Image.fromarray((120 + 50 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))


def write_tar(path: Path, size: tuple[int, int], images: int) -> float:
    """Writes a tar of images with captions. Returns bytes per pixel."""
    rng, total = np.random.default_rng(0), 0
    with tarfile.open(path, "w") as tar:
        for number in range(images):
            buffer = io.BytesIO()
            photograph(*size, rng).save(buffer, "JPEG", quality=85)
            total += buffer.tell()
            for suffix, data in (("jpg", buffer.getvalue()), ("txt", b"a photograph of noise")):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return total / (images * size[0] * size[1])


def ours(tar: Path, resolution: int, crop: str = "center", crops: int = 1) -> Iterator[Tensor]:
    """Batches uint8 (B, N, R, R, 3), as a worker of the encode job makes them, N crops per image."""
    source = TarSource(urls=str(tar))
    preparation = Preparation(Filter(), None, (resolution,), crop, crops, upscale=True, seed=0, batch=BATCH)
    shards = [InputShard("train", shard) for shard in source.shards()]
    for batch in DecodedBatches(shards, {"train": source}, preparation):
        yield batch.pixels[resolution][: len(batch.images)]


def with_pillow(tar: Path, resolution: int) -> Iterator[Tensor]:
    """Batches uint8 (B, 1, R, R, 3) by webdataset and torchvision's functions for Pillow images."""

    def prepared(image: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(square(image, min(image.size), resolution)))[None]

    yield from _batches(webdataset.WebDataset(str(tar), shardshuffle=False).decode("pilrgb"), prepared)


def with_tensors(tar: Path, resolution: int) -> Iterator[Tensor]:
    """Batches uint8 (B, 1, R, R, 3) by webdataset, torchvision's decoder and its functions for tensors."""

    def prepared(data: bytes) -> Tensor:
        image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        return square(image, min(image.shape[1:]), resolution).permute(1, 2, 0)[None]

    yield from _batches(webdataset.WebDataset(str(tar), shardshuffle=False), prepared)


def square(image: Any, side: int, resolution: int) -> Any:
    """The central square of the given side, resized, by torchvision."""
    cropped = functional.center_crop(image, [side])
    return functional.resize(cropped, [resolution], InterpolationMode.BICUBIC, antialias=True)


def _batches(samples: Any, prepared: Callable[[Any], Tensor]) -> Iterator[Tensor]:
    rows: list[Tensor] = []
    for sample in samples:
        rows.append(prepared(sample["jpg"]))
        if len(rows) == BATCH:
            yield torch.stack(rows)
            rows = []
    if rows:
        yield torch.stack(rows)


READERS: dict[str, Callable[[Path, int], Iterator[Tensor]]] = {
    OURS: ours,
    "webdataset and torchvision, Pillow images": with_pillow,
    "webdataset and torchvision, tensors": with_tensors,
}


def run(tar: Path, resolution: int, rounds: int) -> dict[str, float]:
    """Images per CPU second by reader.

    Raises:
        ValueError: a reader delivers other images.
    """
    first = torch.cat(list(ours(tar, resolution))).numpy()
    for name, reader in READERS.items():
        found = psnr(torch.cat(list(reader(tar, resolution))).numpy(), first)
        if found < ALIKE:
            raise ValueError(f"{name} delivers other images than {OURS} (PSNR {found:.1f} dB)")
    readers = {**READERS, DALLE: lambda tar, resolution: ours(tar, resolution, "transformer", 4)}
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds):
        for name, reader in readers.items():
            began = time.process_time()
            images = sum(len(batch) for batch in reader(tar, resolution))
            rates[name].append(images / (time.process_time() - began))
    return {name: statistics.median(found) for name, found in rates.items()}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["640x480", "1024x768", "1600x1200"], metavar="WxH")
    parser.add_argument("--resolutions", nargs="+", type=positive, default=[256, 512])
    parser.add_argument("--images", type=positive, default=64, help="per tar")
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(arguments)
    for size in options.sizes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
            parser.error(f"--sizes {size}: give width and height in pixels, such as 1024x768")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            width, height = (int(side) for side in size.split("x"))
            tar = Path(folder) / f"{size}.tar"
            density = write_tar(tar, (width, height), options.images)
            for resolution in options.resolutions:
                rates = run(tar, resolution, options.rounds)
                for name, rate in rates.items():
                    row = {"image": size, "bytes/pixel": round(density, 2), "resolution": resolution, "reader": name}
                    rows.append({**row, "images/s": round(rate, 1), "ratio": round(rates[OURS] / rate, 2)})
    write_results("encode_reading", "photographs", rows, f"ratio: rate of {OURS} over this one. One thread, CPU time.")
    return rows


if __name__ == "__main__":
    main()
