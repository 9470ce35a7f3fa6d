"""Both quickstarts with very small models, through the functions that their commands call: data, VAE, text encoder,
latents, diffusion model, samples; and data, dVAE, vocabulary, tokens, transformer, samples."""

import json
import sys

import numpy as np
import pytest
import yaml
from PIL import Image

from data import openmoji
from data.encoded.manifest import Manifest
from precompute import encode, vocabulary
from recipes import generate, train

ONE_LINE = ["loggers={}", "callbacks.throughput=null", "checkpoints.save=false"]
VAE = ["model={channels: [8, 16, 16], norm_groups: 4}", "data.resolution=32", "evals.val.resolution=32"]
TEXT = [
    "model={width: 32, layers: 2, heads: 2, context_length: 16, picture_size: 32, picture_width: 32, "
    "picture_layers: 1, embedding: 16}",
    "data={resolution: 32, tokens: 16}",
    "evals.val={resolution: 32, tokens: 16}",
]
DIT = "{width: 16, layers: 1, heads: 2}"
UNET = "{channels: [16, 32], attention: [false, true], heads: [1, 2], norm_groups: 8}"
DIFFUSION = [
    "model.denoiser.text_width=32",
    "data={resolution: 32, workers: 1}",
    "evals.val.resolution=32",
    "callbacks.sample_grid={every: null, prompts: [red heart, cat face], steps: 2}",
    "callbacks.export.every=null",
]


DVAE = ["model={codes: 32, hidden: 8, initial: 8}", "data.resolution=32", "evals.val.resolution=32"]
TRANSFORMER = [
    "model={layers: 2, width: 16, heads: 2, text_positions: 12, text_vocabulary: 300, side: 4, codes: 32, kernel: 3}",
    "data={resolution: 32, positions: 12, workers: 0}",
    "evals.val={resolution: 32, positions: 12}",
    "callbacks.token_grid={every: null, prompts: [red heart, cat face]}",
    "callbacks.export.every=null",
]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty working folder, since paths in recipes are relative; returns the path of a YAML by its name."""
    yamls = train.ROOT / "yamls"
    monkeypatch.chdir(tmp_path)
    return lambda name: str(yamls / name)


def fit(monkeypatch, yaml_path, batches, size, *overrides):
    """Runs recipes/train.py for some batches of a size, with further overrides."""
    short = [f"training={{duration: {batches}ba, global_batch: {size}, eval_every: null, device: cpu}}"]
    short.append("schedule.warmup=1ba")
    monkeypatch.setattr(sys, "argv", ["train.py", yaml_path, *ONE_LINE, *short, *overrides])
    train.main()


@pytest.mark.slow
def test_from_nothing_to_pictures(root, tmp_path, monkeypatch, capsys):
    done = openmoji.build("runs/openmoji/tars", size=32, limit=200, workers=1)
    pictures = done["pictures"]
    assert pictures["train"] + pictures["val"] == 200 and pictures["val"] >= 4

    fit(monkeypatch, root("openmoji_vae.yaml"), 4, 8, *VAE)
    fit(monkeypatch, root("openmoji_text.yaml"), 4, 8, *TEXT)
    for stage in ("openmoji_vae", "openmoji_text"):
        assert json.loads((tmp_path / "runs" / stage / "export" / "done.json").read_text())["batches"] == 4
    assert list((tmp_path / "runs" / "openmoji_vae" / "reconstructions").glob("*.png"))

    encode.main([root("openmoji_encode.yaml"), "resolutions=[32]", "workers=0", "device=cpu"])
    for split, count in pictures.items():
        manifest = Manifest.read(f"runs/openmoji/latents/{split}")
        assert manifest.samples == count and not manifest.rejected
        manifest.check(resolution=32, channels=4, downsample=4, text_width=32, text_length=16)

    fit(monkeypatch, root("openmoji_unet.yaml"), 2, 8, *DIFFUSION, f"model.denoiser={UNET}")
    fit(monkeypatch, root("openmoji_diffusion.yaml"), 6, 8, *DIFFUSION, f"model.denoiser={DIT}")
    capsys.readouterr()
    prompts = ["--prompts", "red heart", "cat face", "pizza", "--steps", "2", "--columns", "3", "--device", "cpu"]
    generate.main(["runs/openmoji_diffusion", *prompts, "--out", "grid.png"])
    assert capsys.readouterr().out == "grid.png\n"
    with Image.open("grid.png") as grid:
        assert grid.size == (3 * (128 + 6) + 6, 128 + 19 + 12)
        assert np.asarray(grid).std() > 1

    # A second start of the complete data and encode stages changes nothing.
    openmoji.build("runs/openmoji/tars", size=32, limit=200, workers=1)
    before = (tmp_path / "runs/openmoji/latents/train/manifest.json").stat().st_mtime_ns
    encode.main([root("openmoji_encode.yaml"), "resolutions=[32]", "workers=0", "device=cpu"])
    assert "already complete: runs/openmoji/latents" in capsys.readouterr().out
    assert (tmp_path / "runs/openmoji/latents/train/manifest.json").stat().st_mtime_ns == before
    # The saved configs are recipes themselves.
    for stage in ("openmoji_vae", "openmoji_text", "openmoji_diffusion"):
        values = yaml.safe_load((tmp_path / "runs" / stage / "config.yaml").read_text())
        assert values["run_name"] == stage and values["output"] == f"runs/{stage}"

    # Latents of another VAE are refused, with the name of the field that differs.
    path = tmp_path / "runs/openmoji/latents/val/manifest.json"
    values = json.loads(path.read_text())
    values["image_encoder"]["channels"] = 8
    path.write_text(json.dumps(values))
    with pytest.raises(SystemExit) as end:
        fit(monkeypatch, root("openmoji_diffusion.yaml"), 1, 8, *DIFFUSION, f"model.denoiser={DIT}")
    assert end.value.code == 2 and "channels is 8, the recipe expects 4" in capsys.readouterr().err


@pytest.mark.slow
def test_from_nothing_to_pictures_by_tokens(root, monkeypatch, capsys):
    openmoji.build("runs/openmoji/tars", size=32, limit=200, workers=1)
    fit(monkeypatch, root("openmoji_dvae.yaml"), 4, 8, *DVAE)
    fit(monkeypatch, root("openmoji_text.yaml"), 4, 8, *TEXT)
    vocabulary.main([root("openmoji_vocabulary.yaml"), "entries=300"])
    encode.main([root("openmoji_tokens.yaml"), "resolutions=[32]", "workers=0", "device=cpu"])
    fit(monkeypatch, root("openmoji_dalle.yaml"), 6, 8, *TRANSFORMER)
    capsys.readouterr()
    prompts = ["--prompts", "red heart", "cat face", "--each", "2", "--candidates", "3", "--columns", "2"]
    rerank = ["--rerank", "runs/openmoji_text/export", "--device", "cpu"]
    generate.main(["runs/openmoji_dalle", *prompts, *rerank, "--out", "grid.png"])
    assert capsys.readouterr().out == "grid.png\n"
    with Image.open("grid.png") as grid:
        assert grid.size == (2 * (128 + 6) + 6, 2 * (128 + 19 + 6) + 6)
        assert np.asarray(grid).std() > 1
