"""Lean blocks compute what diffusers' compute, with fewer copies."""

import copy

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn
from torch.nn import functional as F

from recipes.algorithms.modules.attention import use_attention
from recipes.algorithms.modules.channels_last import use_channels_last
from recipes.algorithms.modules.lean_blocks import LeanBlocks
from recipes.models.blocks.lean import LeanResnetBlock, LeanTransformer, LeanUpsample, make_lean
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.algorithms.modules.test_attention import Operations
from tests.recipes.training.fake_run import FakeRun

COPIES = ("clone", "copy_", "contiguous", "div")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    sizes = {"channels": [16, 32], "attention": [True, True], "heads": [1, 2], "text_width": 8}
    network = unet(**sizes, blocks=1, norm_groups=8)
    for parameter in network.parameters():  # biases that are 0 would hide where they are added
        nn.init.normal_(parameter, std=0.1)
    return network


def outputs(network, dtype, batch=2):
    """The network's result and the gradients of all parameters."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 4, 8, 8, generator=generator, dtype=dtype)
    text = torch.randn(batch, 5, 8, generator=generator, dtype=dtype)
    times = torch.randint(1000, (batch,), generator=generator)
    y = network(x, times, text)
    return [y, *torch.autograd.grad(y.square().mean(), list(network.parameters()))]


@pytest.mark.parametrize("channels_last", [False, True])
def test_lean_blocks_give_the_same(network, channels_last):
    """In 64 bits but for the embedding of the timestep, which diffusers computes in 32."""
    lean = copy.deepcopy(network).double()
    plain = copy.deepcopy(lean)
    names = list(lean.state_dict())
    resnets = sum(type(m) is ResnetBlock2D for m in lean.modules())
    assert make_lean(lean) == resnets + 7 + 1  # transformers: one per level down, the middle, two per level up
    assert list(lean.state_dict()) == names
    if channels_last:
        use_channels_last(lean)
        use_channels_last(plain)
    for one, other in zip(outputs(lean, torch.float64), outputs(plain, torch.float64), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_feature_maps_stay_in_channels_last(network):
    lean = copy.deepcopy(network)
    use_channels_last(lean)
    make_lean(lean)
    use_attention(lean, "sdpa", on_gpu=False)
    seen = []
    for name, module in lean.named_modules():
        if isinstance(module, LeanResnetBlock | LeanTransformer | LeanUpsample | nn.GroupNorm):

            def look(module, inputs, output, name=name):
                output = output[0] if isinstance(output, tuple) else output
                seen.append((name, inputs[0].is_contiguous(memory_format=torch.channels_last)))
                seen.append((name, output.is_contiguous(memory_format=torch.channels_last)))

            module.register_forward_hook(look)
    copies = Operations(*COPIES)
    batch = 64  # from which on diffusers' upsampling copies
    x = torch.randn(batch, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    with copies:
        lean(x, torch.zeros(batch, dtype=torch.long), torch.randn(batch, 5, 8))
    assert len(seen) > 40 and [name for name, kept in seen if not kept] == []
    plain = copy.deepcopy(network)
    use_channels_last(plain)
    theirs = Operations(*COPIES)
    with theirs:
        plain(x, torch.zeros(batch, dtype=torch.long), torch.randn(batch, 5, 8))
    assert copies.found == ["aten.div.Tensor"] and len(theirs.found) > 30  # the frequencies of the timestep


def test_an_autoencoder():
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    plain = AutoencoderKL(block_out_channels=[8, 16], norm_num_groups=4, latent_channels=4, **blocks).double()
    lean = copy.deepcopy(plain)
    make_lean(lean)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for one, other in zip(*(network(x, return_dict=False) for network in (lean, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
def test_a_shortcut_with_and_without_a_bias(bias):
    torch.manual_seed(0)
    plain = ResnetBlock2D(in_channels=32, out_channels=64, temb_channels=8, conv_shortcut_bias=bias).double()
    lean = copy.deepcopy(plain)
    make_lean(lean)
    inputs = torch.randn(2, 32, 4, 4, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    torch.testing.assert_close(lean(*inputs), plain(*inputs), rtol=1e-10, atol=1e-10)


def test_a_grid_that_is_too_large_for_the_kernel_of_its_format(monkeypatch):
    """That one has indices of 32 bits."""
    seen, theirs = [], F.interpolate
    monkeypatch.setattr(F, "interpolate", lambda x, **options: seen.append(x.is_contiguous()) or theirs(x, **options))
    lean = Upsample2D(8, use_conv=True)
    make_lean(lean)
    x = torch.randn(1, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    for most, contiguous in ((8 * 8 * 8, False), (8 * 8 * 8 - 1, True)):
        monkeypatch.setattr("recipes.models.blocks.lean.MOST", most)
        lean(x)
        assert seen.pop() is contiguous


def test_the_lever(network, capsys):
    run = FakeRun(copy.deepcopy(network))
    LeanBlocks(run.task).change_modules(run)
    count = run.settings["lean_blocks"]
    assert capsys.readouterr().out == f"lean_blocks: {count} blocks\n"
    with pytest.raises(ValueError, match="^lean_blocks: the model has no residual"):
        make_lean(run.task)
