"""Which norms are fused, and what the lever says; what they compute is tested with the kernels."""

import copy

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.nn import functional as F

from recipes.algorithms.modules import fused_group_norm
from recipes.algorithms.modules.fused_group_norm import FusedGroupNorms, fuse_group_norms
from recipes.algorithms.modules.low_precision_norms import LowPrecisionGroupNorm, lower_norms
from recipes.models.kernels.fused_norm import Case, FusedGroupNorm, Times
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.training.fake_run import FakeRun


def small_unet():
    torch.manual_seed(0)
    return unet(channels=[8, 16], attention=[False, True], heads=[1, 2], text_width=8, norm_groups=4, blocks=1)


def batch():
    return torch.randn(2, 4, 8, 8), torch.tensor([3, 9]), torch.randn(2, 3, 8)


def test_every_norm_of_a_unet_and_off_the_gpu_the_same_result():
    plain = small_unet()
    fused = copy.deepcopy(plain)
    parameters = list(fused.parameters())
    norms = [m for m in fused.modules() if isinstance(m, nn.GroupNorm)]
    assert fuse_group_norms(fused, measured=True) == len(norms)
    assert all(isinstance(norm, FusedGroupNorm) for norm in norms)
    transformers = [name for name, m in fused.named_modules() if isinstance(m, FusedGroupNorm) and not m.silu]
    assert transformers and all(".attentions." in name for name in transformers)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert all(one is other for one, other in zip(fused.parameters(), parameters, strict=True))
    inputs = batch()
    assert torch.equal(fused(*inputs), plain(*inputs))


class OwnBlock(ResnetBlock2D):
    """Has an activation of its own after its norms."""

    def forward(self, x, temb):
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class OwnNorm(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x - x.mean())


def test_blocks_and_norms_of_ones_own_stay():
    """SiLU was applied twice, and the kernel took the place of another norm."""
    torch.manual_seed(0)
    sizes = {"in_channels": 8, "temb_channels": None, "groups": 4}
    own, plain, mixed, without = OwnBlock(**sizes), *(ResnetBlock2D(**sizes) for _ in range(3))
    mixed.norm1 = OwnNorm(4, 8)
    without.norm2 = nn.GroupNorm(4, 8, affine=False)
    blocks = nn.ModuleList([own, plain, mixed, without])
    x = torch.randn(2, 8, 4, 4)
    before = [block(x, None) for block in blocks]
    assert fuse_group_norms(blocks, measured=False) == 2
    assert isinstance(plain.norm1, FusedGroupNorm) and type(mixed.norm1) is OwnNorm
    for block, expected in zip(blocks, before, strict=True):
        torch.testing.assert_close(block(x, None), expected)


def test_on_the_meta_device():
    with torch.device("meta"):
        model = small_unet()
        lower_norms(model)
        fuse_group_norms(model, measured=False)
        latents, timesteps, text = torch.empty(2, 4, 8, 8), torch.empty(2, dtype=torch.long), torch.empty(2, 3, 8)
        assert model(latents, timesteps, text).shape == (2, 4, 8, 8)


def test_an_autoencoders_too():
    model = AutoencoderKL(
        block_out_channels=(8,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        norm_num_groups=4,
    )
    x = torch.randn(1, 3, 8, 8)
    before = model(x).sample
    fuse_group_norms(model, measured=False)
    assert {n for n, m in model.named_modules() if type(m) is nn.GroupNorm} == {
        "encoder.mid_block.attentions.0.group_norm",  # of sequences, without SiLU
        "decoder.mid_block.attentions.0.group_norm",
    }
    assert torch.equal(model(x).sample, before)


def test_after_low_precision_norms_and_before():
    first, second = small_unet(), small_unet()
    lower_norms(first)
    fuse_group_norms(first, measured=True)
    fuse_group_norms(second, measured=True)
    lower_norms(second)  # LayerNorms alone
    assert {m.plain for m in first.modules() if isinstance(m, FusedGroupNorm)} == {LowPrecisionGroupNorm}
    assert {m.plain for m in second.modules() if isinstance(m, FusedGroupNorm)} == {nn.GroupNorm}
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(first(*inputs), second(*inputs), rtol=0.05, atol=0.05)


def test_nothing_to_fuse_is_an_error():
    with pytest.raises(ValueError, match="no GroupNorm of a diffusers block"):
        fuse_group_norms(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()), measured=True)
    model = small_unet()
    fuse_group_norms(model, measured=True)
    with pytest.raises(ValueError, match="no GroupNorm"):
        fuse_group_norms(model, measured=True)


def test_without_a_gpu(capsys):
    model = small_unet()
    with pytest.raises(ValueError, match="need a GPU; use auto"):
        FusedGroupNorms(model, when="always").change_modules(FakeRun(model))
    lever = FusedGroupNorms(model)
    lever.change_modules(FakeRun(model))
    assert capsys.readouterr().out == "fused_group_norm: not used, its kernels need a GPU\n"
    assert not any(isinstance(m, FusedGroupNorm) for m in model.modules())
    assert not lever.to_report


def test_auto_says_once_what_it_took(monkeypatch, capsys):
    case = Case(nn.GroupNorm, (2, 8, 4, 4), 2, torch.bfloat16, torch.bfloat16, True, True)
    model = small_unet()
    run = FakeRun(model)
    run.device = torch.device("cuda")  # by which levers decide; tensors stay on the CPU
    lever = FusedGroupNorms(model)
    lever.change_modules(run)
    monkeypatch.setattr(fused_group_norm, "TIMES", {case: Times(0.5, 1.0)})
    for _ in range(2):
        lever.step_end(run)
    assert capsys.readouterr().out.splitlines() == [
        "fused_group_norm: 21 norms, auto",
        "fused_group_norm: 2x8x4x4 0.500 ms, PyTorch 1.000 ms: fused",
    ]
    assert run.settings == {"fused_group_norm": 21, "fused_group_norm_shapes": 1}


def test_auto_says_so_when_no_norm_qualified(monkeypatch, capsys):
    monkeypatch.setattr(fused_group_norm, "TIMES", {})
    model = small_unet()
    FusedGroupNorms(model).report(FakeRun(model))
    assert "no norm had a channels_last input" in capsys.readouterr().out


def test_a_recipe_on_a_cpu_trains_without(small_recipe, fit, tmp_path, capsys):
    trainer = fit(small_recipe(tmp_path, "training.duration=1ba"))
    assert trainer.state.timestamp.batch.value == 1
    assert "fused_group_norm: not used, its kernels need a GPU" in capsys.readouterr().out
