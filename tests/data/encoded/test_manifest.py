"""The manifest's file and its checks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.encoded.manifest import Manifest


def manifest(**changes) -> Manifest:
    values = {
        "image_encoder": {
            "component": {"name": "kl_vae", "path": "somewhere"}, "id": "somewhere", "weights_hash": "a" * 64,
            "precision": "fp16", "channels": 4, "downsample": 8, "scaling_factor": 0.18215, "shift_factor": 0.0,
        },
        "text_encoder": {
            "component": {"name": "open_clip_text"}, "id": "ViT-H-14", "weights_hash": "b" * 64, "precision": "fp16",
            "layer": "penultimate", "tokenizer": "SimpleTokenizer", "length": 77, "width": 1024,
        },
        "resolutions": [256, 512], "crop": "center", "upscale": False, "seed": 17, "filter": {"name": "pictures"},
        "dtype": "float16", "normalisation": "once", "caption_policy": "whole", "columns": {"key": "str"},
        "samples": 3, "rejected": {"broken_image": 1}, "reencoded": 0, "upscaled": {"256": 0}, "shards": 2,
        "bytes": 1000, "latents": {"256": {"mean": [0.0], "std": [1.0], "sample_std": [1.0]}}, "request": {},
        "software": {"torch": "2.7.0"},
    }  # fmt: skip
    return Manifest(**values | changes)


def test_written_and_read(tmp_path):
    manifest().write(tmp_path)
    assert Manifest.read(tmp_path) == manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert manifest().latent_shape(512) == (4, 64, 64) and manifest().text_shape == (77, 1024)


def tokens(**changes) -> Manifest:
    image = {"component": {"name": "dvae"}, "id": "d", "weights_hash": "d" * 64, "precision": "fp32", "downsample": 8}
    own = {"kind": "tokens", "crops": 4, "crop": "transformer", "dtype": "uint16", "text_encoder": None, "latents": {}}
    return manifest(image_encoder=image | {"codes": 8192}, **own | changes)


def test_tokens(tmp_path):
    tokens().write(tmp_path)
    assert Manifest.read(tmp_path) == tokens() and tokens().side(256) == 32
    tokens().check(kind="tokens", resolution=256, side=32, codes=8192, crops=4, image_weights="d" * 64)
    with pytest.raises(ValueError, match="side is 64, the recipe expects 32; train at a resolution whose grid fits"):
        tokens().check(resolution=512, side=32)
    with pytest.raises(
        ValueError, match="codes is 8192, the recipe expects 512; give the transformer the set's number"
    ):
        tokens().check(codes=512)
    for field in "channels", "text_width", "scaling_factor":
        with pytest.raises(ValueError, match=f"of tokens knows no field {field}"):
            tokens().check(**{field: 1})
    with pytest.raises(ValueError, match="of latents knows no field codes"):
        manifest().check(codes=8192)


def test_sets_of_before_there_were_tokens(tmp_path):
    manifest().write(tmp_path)
    values = json.loads((tmp_path / "manifest.json").read_text())
    del values["kind"], values["crops"]
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    assert Manifest.read(tmp_path) == manifest() and manifest().kind == "latents"


def test_what_fits_passes():
    manifest().check(resolution=512, channels=4, downsample=8, text_width=1024, text_length=77, scaling_factor=0.18215)
    manifest().check(tokenizer="SimpleTokenizer", image_weights="a" * 64, text_weights="b" * 64, shift_factor=0)
    manifest().check(resolution=None, channels=None)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"resolution": 384}, r"resolution is \[256, 512\], the recipe expects 384; train at a resolution the set has"),
        ({"channels": 16}, "channels is 4, the recipe expects 16; give the denoiser"),
        ({"text_width": 768}, "text_width is 1024, the recipe expects 768; set the denoiser's cross-attention width"),
        ({"text_length": 24}, "text_length is 77, the recipe expects 24"),
        ({"scaling_factor": 0.13025}, "scaling_factor is 0.18215, the recipe expects 0.13025"),
        ({"scaling_factor": "high"}, "scaling_factor is 0.18215, the recipe expects high"),
        ({"image_weights": "c"}, "these latents come from other VAE weights"),
        ({"crop": "random"}, "crop is center, the recipe expects random; change the recipe's crop"),
        ({"resolutions": 256}, "knows no field resolutions: did you mean resolution"),
        ({"channels": 4, "text_width": 1}, "text_width is 1024"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, expected, message):
    manifest().write(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        Manifest.read(tmp_path).check(**expected)
    assert str(tmp_path) in str(error.value) or "knows no field" in str(error.value)


def test_a_folder_without_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not an encoded set, or not finished; run `python precompute"):
        Manifest.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("dtype"), "missing field `dtype`"),
        (lambda v: v.update(more=1), "unknown field `more`"),
        (lambda v: v.update(samples="3"), "samples is '3', expected int"),
        (lambda v: v.update(version=2), "version is 2, this code reads 1"),
    ],
)
def test_damaged_ones(tmp_path, change, message):
    manifest().write(tmp_path)
    file = tmp_path / "manifest.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        Manifest.read(tmp_path)
    for text in ("{", "[1]"):
        with pytest.raises(ValueError, match="encode the set again"):
            Manifest.parse(text)


def test_only_the_standard_library_is_imported():
    root = Path(__file__).resolve().parents[3]
    code = (
        "import sys; before = set(sys.modules); import data.encoded.manifest; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - {'data'}; "
        "print(new - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
