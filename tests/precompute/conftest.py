"""Tars in img2dataset's layout and encode jobs over them, with the tiny encoders of tests/conftest.py."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

# Smaller than a resolution of 32, empty caption, broken file.
BAD = {"00001_000": "too_small", "00001_002": "empty_caption", "00002_001": "broken_image"}
SHARDS, PER_SHARD = 3, 5


def picture(seed: int, width: int, height: int) -> bytes:
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(low).resize((width, height), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="session")
def tars(tmp_path_factory) -> Path:
    """Three tars of five samples, three of which are to be set aside."""
    root = tmp_path_factory.mktemp("tars")
    for shard in range(SHARDS):
        with tarfile.open(root / f"{shard:05d}.tar", "w") as tar:
            for number in range(PER_SHARD):
                key = f"{shard:05d}_{number:03d}"
                reason = BAD.get(key)
                width, height = (20, 20) if reason == "too_small" else (40 + 3 * number, 36 + 5 * shard)
                data = picture(10 * shard + number, width, height)
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
    """The same as `recipe` names, in fp32."""
    from recipes.encoders.text import open_clip_text
    from recipes.encoders.vae import kl_vae

    return kl_vae(path=str(vae_folder), precision="fp32"), open_clip_text(path=str(clip_folder), precision="fp32")


@pytest.fixture
def recipe(tars, vae_folder, clip_folder, tmp_path):
    """Writes an encode YAML with changed keys and gives its path."""

    def write(**changes) -> str:
        values = {
            "out": str(tmp_path / "out"),
            "sources": {"train": {"name": "tars", "urls": f"{tars}/*.tar"}},
            "resolutions": [16, 32],
            "image_encoder": {"name": "kl_vae", "path": str(vae_folder), "precision": "fp32"},
            "text_encoder": {"name": "open_clip_text", "path": str(clip_folder), "precision": "fp32"},
            "batch": 4,
            "workers": 0,
            "device": "cpu",
        }
        path = tmp_path / "encode.yaml"
        path.write_text(yaml.safe_dump(values | changes))
        return str(path)

    return write


@pytest.fixture
def read():
    """Every sample of an encoded set, by the library that training reads with."""

    def samples(folder) -> list[dict]:
        from streaming import StreamingDataset

        dataset = StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
        return [dataset[i] for i in range(len(dataset))]

    return samples


@pytest.fixture(scope="session")
def encoded(tmp_path_factory, tars, vae_folder, clip_folder) -> Path:
    """The plain case, once: both resolutions, one process, no workers."""
    from precompute.encode import main

    folder = tmp_path_factory.mktemp("encoded")
    values = {
        "out": str(folder / "out"),
        "sources": {"train": {"name": "tars", "urls": f"{tars}/*.tar"}},
        "resolutions": [16, 32],
        "image_encoder": {"name": "kl_vae", "path": str(vae_folder), "precision": "fp32"},
        "text_encoder": {"name": "open_clip_text", "path": str(clip_folder), "precision": "fp32"},
        "batch": 4,
        "workers": 0,
        "device": "cpu",
    }
    (folder / "encode.yaml").write_text(yaml.safe_dump(values))
    main([str(folder / "encode.yaml")])
    return folder / "out" / "train"
