"""Weights fit exactly, or the message says where they do not."""

import errno
import json
import shutil
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn

from recipes.models import weights
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.language.task import Language
from recipes.models.latent_diffusion.dit import DiT
from recipes.models.latent_diffusion.rectified_flow import RectifiedFlow
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.weights import load_diffusers, load_safetensors, save_safetensors


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


@pytest.fixture
def save(tmp_path, network):
    """Writes the network's weights but for some changes; None leaves a tensor out."""

    def write(**changes):
        tensors = {**network.state_dict(), **{name.replace("_", "."): value for name, value in changes.items()}}
        save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "weights.safetensors")
        return tmp_path / "weights.safetensors"

    return write


def test_all_tensors_are_taken(network, save):
    file = save(**{"1_weight": torch.full((1, 2), 7.0)})
    load_safetensors(network, file)
    assert network[1].weight.tolist() == [[7.0, 7.0]]


def test_weights_in_channels_last_are_written(tmp_path):
    network = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    assert not network.weight.is_contiguous()
    save_safetensors(network.state_dict(), tmp_path / "weights.safetensors")
    other = nn.Conv2d(3, 2, 3)
    load_safetensors(other, tmp_path / "weights.safetensors")
    assert torch.equal(other.weight, network.weight) and torch.equal(other.bias, network.bias)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1_bias": None}, "missing 1.bias$"),
        ({"2_bias": torch.zeros(1)}, "unknown 2.bias$"),
        ({"1_weight": torch.zeros(1, 3)}, r"1.weight has shape \(1, 3\), the model \(1, 2\)$"),
        ({"0_weight": None, "0_bias": None, "1_weight": None, "1_bias": None, "x_y": torch.ones(1)}, "and 2 more$"),
    ],
)
def test_what_does_not_fit_changes_nothing(network, save, changes, message):
    file = save(**changes)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        load_safetensors(network, file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert all((before[name] == value).all() for name, value in network.state_dict().items())


def test_a_file_that_is_not_there(network, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such weights; expected a folder that a training run exported"):
        load_safetensors(network, tmp_path / "none.safetensors")


UNET = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 8,
    "norm_num_groups": 4,
    "attention_head_dim": (2, 2),
}


def unet(**changes):
    return UNet2DConditionModel(**UNET | changes)


def equal(one, other):
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_a_file_that_may_not_be_read_is_not_called_missing(network, save, monkeypatch):
    file = save()
    refused = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(weights, "open", refused, raising=False)  # as root, who runs tests in containers, reads all
    with pytest.raises(PermissionError):
        load_safetensors(network, file)


def test_folders_of_diffusers(tmp_path):
    """Of one network or of a pipeline, in one file or in several, in 32 or 16 bits."""
    known = unet(attention_head_dim=2, sample_size=32)  # one number stands for all levels
    known.save_pretrained(tmp_path / "pipeline" / "unet")
    known.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for folder, part in (("pipeline", "unet"), ("pipeline/unet", None), ("pipeline/unet", "unet"), ("parts", "unet")):
        found = unet()
        load_diffusers(found, tmp_path / folder, part)
        assert equal(found, known), folder
    known.half().save_pretrained(tmp_path / "half", variant="fp16")
    found = unet()
    load_diffusers(found, tmp_path / "half")
    assert found.dtype == torch.float32 and equal(found, known.float())


def test_autoencoders_of_earlier_versions_of_diffusers(tmp_path):
    """Published ones, such as Stable Diffusion's, have other names for the layers of their attention."""
    sizes = {"block_out_channels": (8,), "norm_num_groups": 4}
    known, found = AutoencoderKL(**sizes), AutoencoderKL(**sizes)
    known.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    names = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    tensors = load_file(file)
    for new, old in names.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    assert equal(AutoencoderKL.from_pretrained(tmp_path), known)  # diffusers reads them
    load_diffusers(found, tmp_path)
    assert equal(found, known)


def test_folders_of_other_networks(tmp_path):
    known = unet()
    known.save_pretrained(tmp_path / "unet")
    with pytest.raises(ValueError, match="does not fit the model"):
        load_diffusers(unet(layers_per_block=2), tmp_path / "unet")
    with pytest.raises(ValueError, match=r"attention_head_dim is \[2, 2\], the recipe's network has \[1, 2\]"):
        load_diffusers(unet(attention_head_dim=(1, 2)), tmp_path / "unet")
    with pytest.raises(ValueError, match="norm_num_groups is 4, the recipe's network has 2"):
        load_diffusers(unet(norm_num_groups=2), tmp_path / "unet")
    with pytest.raises(FileNotFoundError, match="no such weights; expected a folder that diffusers or a training run"):
        load_diffusers(known, tmp_path)
    file = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    with pytest.raises(FileNotFoundError, match="a .bin file is a pickle, which is never read"):
        load_diffusers(known, tmp_path / "unet")
    # A part of several that is missing.
    known.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    index = json.loads((tmp_path / "parts" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    last = sorted(set(index["weight_map"].values()))[-1]
    shutil.move(tmp_path / "parts" / last, tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=last):
        load_diffusers(known, tmp_path / "parts")
    for content in ({}, {"weight_map": {}}, {"weight_map": {"conv_in.bias": 1}}):  # the second was an IndexError
        (tmp_path / "parts" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="index.json: no `weight_map` from tensors to files; copy the folder"):
            load_diffusers(known, tmp_path / "parts")


TOKENS = {"text_positions": 4, "text_vocabulary": 9, "side": 3, "codes": 5}


def diffusion(**changes):
    sizes = {"width": 16, "layers": 1, "heads": 2, "text_width": 8} | changes
    return LatentDiffusion(denoiser=DiT(**sizes), objective=RectifiedFlow())


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (diffusion, {"heads": 4}),
        (diffusion, {"latent_channels": 16, "patch_size": 1}),
        (partial(Autoregressive, layers=1, width=16, **TOKENS), {"heads": 4}),
        (partial(Autoregressive, layers=1, width=16, **TOKENS), {"kernel": 5}),
        (partial(Language, layers=1, width=16, positions=4, vocabulary=9), {"heads": 4}),
    ],
)
def test_exports_that_differ_in_no_shape(tmp_path, build, change):
    """Such as in the number of heads: the weights would load, and compute something else."""
    build(**{"heads": 2}).export(tmp_path)
    build(**{"heads": 2}).load_export(tmp_path)
    with pytest.raises(ValueError, match=rf"config.json: ({'|'.join(change)}) is \d+, the recipe's network has \d+$"):
        build(**{"heads": 2} | change).load_export(tmp_path)
