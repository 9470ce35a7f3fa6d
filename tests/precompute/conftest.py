"""Tars in img2dataset's layout and encode jobs that read them, with the tiny encoders of tests/conftest.py."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

# Rejected samples: an image smaller than a resolution of 32, an empty caption, a file that breaks off.
BAD = {"00001_000": "too_small", "00001_002": "empty_caption", "00002_001": "broken_image"}
SHARDS, PER_SHARD = 3, 5


def png(seed: int, width: int, height: int) -> bytes:
    """A smooth random image."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(low).resize((width, height), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="session")
def tars(tmp_path_factory) -> Path:
    """Three tars of five samples each; three of the samples are rejected."""
    root = tmp_path_factory.mktemp("tars")
    for shard in range(SHARDS):
        with tarfile.open(root / f"{shard:05d}.tar", "w") as tar:
            for number in range(PER_SHARD):
                key = f"{shard:05d}_{number:03d}"
                reason = BAD.get(key)
                width, height = (20, 20) if reason == "too_small" else (40 + 3 * number, 36 + 5 * shard)
                data = png(10 * shard + number, width, height)
                data = data[: len(data) // 2] if reason == "broken_image" else data
                caption = "" if reason == "empty_caption" else f"a picture of {number} things in box {shard}"
                about = json.dumps({"n": number}).encode()
                for suffix, content in ("png", data), ("txt", caption.encode()), ("json", about):
                    member = tarfile.TarInfo(f"{key}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return root


@pytest.fixture(scope="session")
def encoders(vae_folder, clip_folder):
    """The encoders that `recipe` names."""
    from recipes.encoders.text import open_clip_text
    from recipes.encoders.vae import kl_vae

    return kl_vae(path=str(vae_folder), precision="fp32"), open_clip_text(path=str(clip_folder), precision="fp32")


@pytest.fixture(scope="session")
def write_recipe(tars):
    """Writes FOLDER/encode.yaml with more or changed keys and returns its path; the output goes to FOLDER/out."""

    def write(folder: Path, **keys) -> str:
        values = {
            "out": str(folder / "out"),
            "sources": {"train": {"name": "tars", "urls": f"{tars}/*.tar"}},
            "batch": 4,
            "workers": 0,
            "device": "cpu",
        }
        path = folder / "encode.yaml"
        path.write_text(yaml.safe_dump(values | keys))
        return str(path)

    return write


@pytest.fixture(scope="session")
def latent_keys(vae_folder, clip_folder) -> dict:
    """The keys of an encode YAML that makes latents at both resolutions."""
    return {
        "resolutions": [16, 32],
        "image_encoder": {"name": "kl_vae", "path": str(vae_folder), "precision": "fp32"},
        "text_encoder": {"name": "open_clip_text", "path": str(clip_folder), "precision": "fp32"},
    }


@pytest.fixture
def recipe(write_recipe, latent_keys, tmp_path):
    """Writes an encode YAML that makes latents, with changed keys, and returns its path."""
    return lambda **changes: write_recipe(tmp_path, **latent_keys | changes)


@pytest.fixture
def read():
    """Returns every sample of an encoded set, read with the library that training uses."""

    def samples(folder) -> list[dict]:
        from streaming import StreamingDataset

        dataset = StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
        return [dataset[i] for i in range(len(dataset))]

    return samples


@pytest.fixture(scope="session")
def encoded(tmp_path_factory, write_recipe, latent_keys) -> Path:
    """A set of latents at both resolutions, encoded by one process without workers."""
    from precompute.encode import main

    folder = tmp_path_factory.mktemp("encoded")
    main([write_recipe(folder, **latent_keys)])
    return folder / "out" / "train"
