"""What runs in channels_last stays in it, and computes what it did before."""

import copy
import re

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import nn

from recipes.algorithms.modules import channels_last
from recipes.algorithms.modules.channels_last import Enlargement, ResidualBlock, SpatialTransformer, use_channels_last
from recipes.algorithms.modules.fused_group_norm import fuse_group_norms
from recipes.models.kernels.fused_norm import FusedGroupNorm
from recipes.models.latent_diffusion.unet import unet


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


def in_order(x):
    """Whether channels are innermost: of a picture, or of a part of one's channels, as gradients of a skip are."""
    return x.dim() != 4 or x.shape[1] == 1 or x.stride(1) == 1


def leaving(model, kinds=(nn.Conv2d, nn.GroupNorm)):
    """Names of modules that a picture, or a gradient of one, reaches in another order; filled as the model runs.

    Not the gradient that the loss gives, of few channels.
    """
    found = set()

    def check(name, kind):
        def hook(module, given, _=None):
            if not all(in_order(x) for x in given if isinstance(x, torch.Tensor)):
                found.add(f"{kind} {name}")

        return hook

    for name, module in model.named_modules():
        if isinstance(module, kinds):
            module.register_forward_hook(check(name, "input"))
            if not name.endswith("conv_out"):
                module.register_full_backward_pre_hook(check(name, "gradient"))
    return found


def step(model, size=2):
    output = model(*inputs(size))
    output.square().mean().backward()
    return output


def test_a_unet_trains_without_leaving_the_order():
    model, composers = small_unet(), small_unet()
    use_channels_last(model)
    composers.to(memory_format=torch.channels_last)
    composers.network.conv_in.register_forward_pre_hook(channels_last._turn)
    found, before = leaving(model), leaving(composers)
    step(model)
    step(composers)
    assert not found
    assert len([name for name in before if name.startswith("input")]) > 10  # what the change is for


def test_batches_of_64_and_more_are_not_copied():
    model = small_unet()
    use_channels_last(model)
    found = leaving(model)
    step(model, size=64)
    assert not found


def test_outputs_that_the_kernel_cannot_index_are_copied(monkeypatch):
    block = Upsample2D(4, use_conv=True, out_channels=4)
    plain = copy.deepcopy(block)
    use_channels_last(block)
    assert type(block) is Enlargement
    seen = []
    block.conv.register_forward_hook(lambda module, given, out: seen.append(in_order(given[0])))
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    outputs = [block(x), block(x, output_size=(5, 7))]
    monkeypatch.setattr(channels_last, "INDEX_LIMIT", 2 * 4 * 6 * 6)
    outputs.append(block(x))
    assert seen == [True, True, False]
    for output, size in zip(outputs, (None, (5, 7), None), strict=True):
        torch.testing.assert_close(output, plain(x, output_size=size))


@pytest.mark.parametrize("training", [True, False])
def test_the_same_result_and_gradients(training):
    model = small_unet().train(training)
    plain = copy.deepcopy(model)
    parameters = list(model.parameters())
    kinds = (ResnetBlock2D, Transformer2DModel, Upsample2D)
    assert use_channels_last(model) == sum(
        isinstance(m, kinds) and getattr(m, "conv_shortcut", m) is not None for m in plain.modules()
    )
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    # Sums in another order: 32-bit noise, of sums over up to 512 pixels.
    torch.testing.assert_close(step(model), step(plain), rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_blocks_alone_in_double_precision():
    """Without noise of the order: each changed class against diffusers' own."""
    torch.manual_seed(0)
    resnet = ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=12, groups=4)
    conv = Transformer2DModel(2, 4, in_channels=8, norm_num_groups=4, cross_attention_dim=6)
    linear = Transformer2DModel(
        2, 4, in_channels=8, norm_num_groups=4, cross_attention_dim=6, use_linear_projection=True
    )
    scaled = ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=None, groups=4, output_scale_factor=1.5)
    x, temb = torch.randn(2, 8, 4, 4, dtype=torch.float64), torch.randn(2, 12, dtype=torch.float64)
    text = torch.randn(2, 3, 6, dtype=torch.float64)
    for block, kind, more in (
        (resnet, ResidualBlock, (temb,)),
        (scaled, ResidualBlock, (None,)),
        (conv, SpatialTransformer, (text,)),
        (linear, SpatialTransformer, (text,)),
    ):
        plain = copy.deepcopy(block).double()
        block.double()
        use_channels_last(block) if kind is not SpatialTransformer or block is conv else _only(block)
        assert type(block) is kind
        grads, outputs = [], []
        for model, order in ((block, torch.channels_last), (plain, torch.contiguous_format)):
            leaf = x.detach().contiguous(memory_format=order).requires_grad_()
            output = model(leaf, *more)
            output = output if isinstance(output, torch.Tensor) else output.sample
            output.square().sum().backward()
            outputs.append(output)
            grads.append([leaf.grad, *(p.grad for p in model.parameters())])
        assert in_order(outputs[0])
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def _only(block):
    block.__class__ = channels_last._without_copies(block)  # it has no convolution of its own


def test_gradients_have_the_order_of_their_parameters():
    """Which DDP's buckets have: it would copy others, and says so."""
    model = small_unet()
    use_channels_last(model)
    step(model)
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


def test_an_autoencoders_too():
    model = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    x = torch.randn(2, 3, 16, 16)
    before = model(x).sample
    use_channels_last(model)
    found = leaving(model, (nn.Conv2d,))
    after = model(x).sample
    after.square().mean().backward()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert found <= {"gradient quant_conv"}  # which the posterior cuts into mean and deviation


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


def test_weights_in_another_order_as_those_of_shards():
    model = small_unet()
    use_channels_last(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    found = leaving(model)
    step(model)
    assert not [name for name in found if name.startswith("input")]


def test_nothing_to_change_is_an_error():
    with pytest.raises(ValueError, match="channels_last: the model has no convolution"):
        use_channels_last(nn.Linear(2, 2))


def test_a_recipe(small_recipe, fit, tmp_path, capsys):
    trainer = fit(small_recipe(tmp_path, "training.duration=1ba"))
    assert re.search(r"^channels_last: \d+ blocks without copies$", capsys.readouterr().out, re.MULTILINE)
    assert any(isinstance(m, ResidualBlock) for m in trainer.state.model.modules())
