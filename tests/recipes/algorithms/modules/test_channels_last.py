"""Models in channels_last compute what they computed before, and images stay in that format between convolutions."""

import copy
import re

import pytest
import torch
from diffusers import AutoencoderKL
from torch import nn

from recipes.algorithms.modules.channels_last import ChannelsLast, use_channels_last
from recipes.algorithms.modules.fused_group_norm import fuse_group_norms
from recipes.models.dvae.network import DVAE
from recipes.models.dvae.task import DiscreteAutoencoder
from recipes.models.kernels.fused_norm import FusedGroupNorm
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.training.fake_run import FakeRun


def small_unet():
    torch.manual_seed(0)
    return unet(
        channels=[8, 16, 16], attention=[True, True, False], heads=[1, 2, 2], text_width=8, norm_groups=4, blocks=1
    )


def inputs(size=2):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(size, 4, 16, 16, generator=generator),
        torch.randint(1000, (size,), generator=generator),
        torch.randn(size, 5, 8, generator=generator),
    )


def is_channels_last(x):
    return x.is_contiguous(memory_format=torch.channels_last)


def step(model, size=2):
    output = model(*inputs(size))
    output.square().mean().backward()
    return output


@pytest.mark.parametrize("training", [True, False])
def test_the_same_result_and_gradients(training):
    model = small_unet().train(training)
    plain = copy.deepcopy(model)
    parameters = list(model.parameters())
    assert use_channels_last(model) == sum(isinstance(m, nn.Conv2d) for m in plain.modules())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    # Sums in another order: 32-bit noise, of sums over up to 512 pixels.
    torch.testing.assert_close(step(model), step(plain), rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_unet_trains_in_channels_last():
    model = small_unet()
    use_channels_last(model)
    assert all(is_channels_last(p) for p in model.parameters() if p.dim() == 4)
    output = step(model)
    assert is_channels_last(output)
    # (C, D, 1, 1) is in both formats, whatever its strides; DDP copies where they differ.
    assert all(is_channels_last(p.grad) for p in model.parameters() if p.dim() == 4)


def test_an_autoencoder():
    model = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    x = torch.randn(2, 3, 16, 16)
    before = model(x).sample
    use_channels_last(model)
    after = model(x).sample
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert is_channels_last(after)


def test_the_encoder_of_a_dvae():
    torch.manual_seed(0)
    model = DVAE(codes=32, hidden=8, blocks=1, initial=8)
    x = torch.rand(2, 3, 32, 32)
    before = model.encoder(x)
    use_channels_last(model)
    after = model.encoder(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # as FSDP gathers them
    seen = []  # not the result: a convolution of 1 x 1, whose weights are in both formats, gives it in channels_last
    model.encoder.blocks.input.register_forward_hook(lambda module, given, output: seen.extend([given[0], output]))
    model.encoder(x)
    assert [is_channels_last(x) for x in seen] == [True, True]


def test_the_codes_of_a_dvae_in_training():
    """The largest tensors of a step: what the decoder is given, and the gradient that the encoder's logits get."""
    task, seen = DiscreteAutoencoder(codes=32, hidden=8, blocks=1, initial=8, beta=1.0), []
    use_channels_last(task)
    encoder, decoder = task.network.encoder.blocks, task.network.decoder.blocks
    encoder.output.conv.register_forward_hook(lambda module, given, logits: logits.register_hook(seen.append) and None)
    decoder.input.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    task({"image": torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)})["total"].backward()
    assert [x.shape for x in seen] == [(2, 32, 4, 4)] * 2
    assert all(is_channels_last(x) and not x.is_contiguous() for x in seen)


@pytest.mark.parametrize("fused_first", [True, False])
def test_with_fused_norms(fused_first):
    model, plain = small_unet(), small_unet()
    if fused_first:
        fuse_group_norms(model, measured=False)
    use_channels_last(model)
    if not fused_first:
        fuse_group_norms(model, measured=False)
    norms = [m for m in plain.modules() if isinstance(m, nn.GroupNorm)]
    assert sum(isinstance(m, FusedGroupNorm) for m in model.modules()) == len(norms)
    torch.testing.assert_close(model(*inputs()), plain(*inputs()), rtol=1e-4, atol=1e-5)


def test_contiguous_weights_as_fsdp_gathers_them():
    model = small_unet()
    use_channels_last(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    seen = []
    model.network.conv_in.register_forward_hook(lambda module, given, output: seen.extend([given[0], output]))
    step(model)
    assert [is_channels_last(x) for x in seen] == [True, True]


def test_nothing_to_change_is_an_error():
    with pytest.raises(ValueError, match="channels_last: the model has no convolution"):
        use_channels_last(nn.Linear(2, 2))


def test_the_lever(capsys):
    run = FakeRun(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)))
    ChannelsLast(run.task).change_modules(run)
    assert re.search(r"^channels_last: 2 convolutions$", capsys.readouterr().out, re.MULTILINE)
    assert run.settings == {"channels_last": 2}
