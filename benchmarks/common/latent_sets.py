"""Images with captions, and the latents that the encode job makes of them, for benchmarks of training."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from PIL import Image

from benchmarks.common.random_encoders import write_encoders
from data.encoded.dataset import key_seed
from data.sources.base import DecodedSample
from data.sources.filters import Filter
from data.transforms import resize_and_crop

if TYPE_CHECKING:
    from precompute.config import EncodeConfig

TARS = 4


@dataclass(frozen=True)
class Encoders:
    """Configurations of the two encoders, as `benchmarks.common.random_encoders.write_encoders` takes them."""

    vae: dict[str, Any]
    text: dict[str, Any]


def write_set(folder: Path, encoders: Encoders, resolutions: list[int], samples: int, gpu: bool) -> None:
    """Writes encoders/, latents/ (as precompute/encode.py does), and pictures/, the same samples not encoded.

    Args:
        folder: an empty folder.
        encoders: configurations; the weights are random.
        resolutions: resolutions of the latents, in pixels.
        samples: number of images.
        gpu: encode on the GPU, in half precision.
    """
    from recipes.config.build import build

    (folder / "encoders").mkdir(parents=True)
    write_encoders(encoders.vae, encoders.text, folder / "encoders")
    _write_tars(folder / "tars", samples, max(resolutions))
    config = encode(folder, resolutions, gpu, batch=16, workers=0)
    _write_pictures(folder, resolutions, build(config.sources)["train"], build(config.text_encoder).tokenize)


def encode(folder: Path, resolutions: list[int], gpu: bool, **options: Any) -> EncodeConfig:
    """Runs the encode job in this process: of the images in tars/, with the encoders in encoders/, to latents/.

    Args:
        folder: has tars/ and encoders/.
        resolutions: resolutions of the latents, in pixels.
        gpu: encode on the GPU, in half precision.
        **options: further keys of the job's config.
    """
    from data.system.ranks import Rank
    from precompute.config import EncodeConfig
    from precompute.encoding.job import run
    from precompute.output.output_set import OutputSet
    from recipes.config.build import build
    from recipes.config.recipe import load_config

    values = {
        "out": str(folder / "latents"),
        "sources": {"train": {"name": "tars", "urls": f"{folder}/tars/*.tar"}},
        "resolutions": resolutions,
        "device": "gpu" if gpu else "cpu",
        **encoder_components(folder, gpu),
        **options,
    }
    (folder / "encode.yaml").write_text(yaml.safe_dump(values))
    config = load_config(folder / "encode.yaml", [], EncodeConfig)
    sources = build(config.sources)
    sets = {"train": OutputSet(f"{config.out}/train", sources["train"].shards())}
    run(config, sources, sets, Rank())
    return config


def encoder_components(folder: Path, gpu: bool) -> dict[str, Any]:
    """The encoders as components of an encode config."""
    precision = "fp16" if gpu else "fp32"
    return {
        "image_encoder": {"name": "kl_vae", "path": f"{folder}/encoders/vae", "precision": precision},
        "text_encoder": {"name": "open_clip_text", "path": f"{folder}/encoders/text", "precision": precision},
    }


def _write_tars(folder: Path, samples: int, side: int) -> None:
    folder.mkdir()
    for tar_number in range(TARS):
        with tarfile.open(folder / f"{tar_number:05d}.tar", "w") as tar:
            for number in range(tar_number, samples, TARS):
                caption = f"a smooth picture, number {number} of {samples}"
                for suffix, content in (("jpg", _smooth(number, side)), ("txt", caption.encode())):
                    entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def _smooth(number: int, side: int) -> bytes:
    """An image of a smooth colour gradient, as JPEG."""
    colours = np.random.default_rng(number).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(colours).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=95)
    return out.getvalue()


def _write_pictures(folder: Path, resolutions: list[int], source: Any, tokenize: Any) -> None:
    """Writes seeds.npy (N,), tokens.npy (N, L), and <R>.npy (N, 3, R, R) uint8 for each resolution R."""
    out = folder / "pictures"
    out.mkdir()
    samples = [Filter().decode(sample) for shard in source.shards() for sample in source.read(shard)]
    assert all(isinstance(sample, DecodedSample) for sample in samples)
    np.save(out / "seeds.npy", np.array([key_seed(sample.key) for sample in samples]))
    np.save(out / "tokens.npy", tokenize([sample.caption for sample in samples]).numpy())
    for resolution in resolutions:
        squares = [resize_and_crop(sample.image, resolution).transpose(2, 0, 1) for sample in samples]
        np.save(out / f"{resolution}.npy", np.stack(squares))
