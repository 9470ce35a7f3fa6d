"""Averaged weights in exports, and in images that are generated from them."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn

from data.system.errors import WrongResult
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.exports.folder import export
from recipes.generation import exports
from recipes.generation.exports import find_export, find_network, load_pipeline
from recipes.models.kl_autoencoder.task import KLAutoencoder
from recipes.models.latent_diffusion.ddpm import DDPM
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.engines.composer.inside import lever_of
from tests.recipes.training.fake_run import FakeRun


def test_exports_hold_both_kinds_of_weights_or_the_averaged_ones(tmp_path, monkeypatch):
    def export_of(task, folder, first):
        raw = first(task).clone()

        @contextmanager
        def average():
            with torch.no_grad():
                first(task).add_(1)
            yield
            with torch.no_grad():
                first(task).copy_(raw)

        export(task, SimpleNamespace(manifest=None, vocabulary=None), folder, {}, complete=True, average=average)
        return raw

    net = unet(channels=[8, 8], attention=[False, True], heads=[1, 1], text_width=8, blocks=1, norm_groups=4)
    folder = tmp_path / "diffusion"
    diffusion = LatentDiffusion(denoiser=net, objective=DDPM())
    raw = export_of(diffusion, folder, lambda task: task.denoiser.network.conv_in.bias)
    for subfolder, shift in (("unet", 0), ("unet_ema", 1)):
        read = UNet2DConditionModel.from_pretrained(str(folder), subfolder=subfolder, low_cpu_mem_usage=False)
        assert torch.equal(read.conv_in.bias, raw + shift)
    assert find_network(folder, None) == find_network(folder, "ema") == folder / "unet_ema"
    assert find_network(folder, "raw") == folder / "unet"
    with monkeypatch.context() as patch:
        images = np.zeros((1, 2, 2, 3), np.uint8)
        asked = SimpleNamespace(generate=lambda captions: images)
        patch.setattr(exports, "load_pipeline", lambda *arguments: setattr(asked, "of", arguments) or asked)
        assert exports.draw(folder, ["a dot"], weights="raw") is images and asked.of[::3] == (folder, "raw")
        with pytest.raises(WrongResult, match=r"returns an array uint8 \(1, 2, 2, 3\) for 2 captions"):
            exports.draw(folder, ["a dot", "a line"])

    vae = KLAutoencoder(channels=[8, 8], blocks=1, norm_groups=4)
    raw = export_of(vae, tmp_path / "vae", lambda task: task.network.decoder.conv_in.bias)
    vae.load_export(tmp_path / "vae")
    assert torch.equal(vae.network.decoder.conv_in.bias, raw + 1)

    export(diffusion, SimpleNamespace(manifest=None, vocabulary=None), tmp_path / "plain", {}, complete=True)
    assert find_network(tmp_path / "plain", None) == tmp_path / "plain" / "unet"
    with pytest.raises(FileNotFoundError, match="--weights ema"):
        find_network(tmp_path / "plain", "ema")


def test_the_512_recipe_exports_and_samples_its_average(tmp_path, small_recipe, fit):
    recipe = small_recipe(
        tmp_path / "run",
        "checkpoints.load_weights=null",
        "training.duration=6ba",
        "algorithms.scheduled_ema.last=4ba",
        "algorithms.scheduled_ema.decay=0.5",
        "callbacks.export={name: export}",
        "callbacks.sample_grid={name: sample_grid, prompts: [a dot], steps: 1}",
        yaml_name="sd2_base_512.yaml",
    )
    made = fit(recipe)
    folder = find_export(tmp_path / "run")
    record = json.loads((folder / "export.json").read_text())
    assert record["average"] == {"decay": 0.5, "every": 1, "begun": 2}
    ema, raw = (load_pipeline(folder, "cpu", "fp32", kind).denoiser for kind in (None, "raw"))
    own = made.state.model.task.denoiser
    assert all(torch.equal(a, b) for a, b in zip(raw.parameters(), own.parameters(), strict=True))
    with lever_of(made, ScheduledEMA).applied():
        assert all(torch.equal(a, b) for a, b in zip(ema.parameters(), own.parameters(), strict=True))
    assert not torch.equal(ema.network.conv_in.weight, raw.network.conv_in.weight)


@pytest.mark.parametrize(("norm", "named"), [("statistics", "1 (BatchNorm2d)"), ("none", None), ("frozen", None)])
def test_statistics_of_the_weights_of_training_are_named(norm, named, capsys):
    """They stay in the model with its averaged weights, whose activations have other ones."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=norm != "none"))
    model[1].train(norm != "frozen")
    run, ema = FakeRun(model), ScheduledEMA(decay=0.5)
    for hook in ("change_modules", "begin"):
        getattr(ema, hook)(run)
    model(torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)))
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ema.applied():
        assert all(torch.equal(buffer, own[name]) for name, buffer in model.named_buffers())
    said = capsys.readouterr().out
    assert ("has statistics of the weights of training" in said) == (named is not None)
    assert named is None or f"scheduled_ema: {named} has statistics" in said
