"""Norms in autocast's precision: equal within bfloat16's rounding, the same parameters, nothing to do is an error."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.common.wide_norms import widen_norms
from recipes.algorithms.modules.low_precision_norms import (
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    LowPrecisionNorms,
    lower_norms,
)
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.training.fake_run import FakeRun

ROUNDING = 2**-8  # of bfloat16, relative


def small_unet():
    torch.manual_seed(0)
    return unet(channels=[16, 32], attention=[False, True], heads=[1, 2], text_width=8, norm_groups=4, blocks=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "norm, shape",
    [(nn.GroupNorm(4, 32), (2, 32, 5, 3)), (nn.LayerNorm(24), (2, 7, 24)), (nn.LayerNorm(24, bias=False), (3, 24))],
)
def test_the_same_as_in_32_bits_within_bfloat16(norm, shape, dtype):
    norm = copy.deepcopy(norm)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = (torch.randn(shape) * 3 + 1).to(dtype).requires_grad_()
    low = nn.Sequential(copy.deepcopy(norm))
    assert lower_norms(low) == 1
    dy = torch.randn(shape)
    results = []
    for module in (norm, low):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x) if module is low else module(x.float())  # in 32 bits, as the GPU's autocast does it
        results.append((y, *torch.autograd.grad(y, (x, *module.parameters()), dy.to(y.dtype))))
    assert results[1][0].dtype == torch.bfloat16
    for full, lowered in zip(*results, strict=True):
        scale = full.abs().max()
        assert (lowered.float() - full.float()).abs().max() <= 4 * ROUNDING * scale


def test_without_autocast_nothing_changes():
    x = torch.randn(2, 8, 3, 3)
    norm = nn.GroupNorm(2, 8)
    before = norm(x)
    lower_norms(nn.Sequential(norm))
    assert type(norm) is LowPrecisionGroupNorm and torch.equal(norm(x), before)


def test_parameters_hooks_and_names_stay():
    model = small_unet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    names, held = list(model.state_dict()), {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [m for m in model.modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm))]
    seen = []
    modules[0].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    assert lower_norms(model) == len(modules)
    assert [m for m in model.modules() if isinstance(m, (LowPrecisionGroupNorm, LowPrecisionLayerNorm))] == modules
    assert list(model.state_dict()) == names and {id(p) for p in model.parameters()} == held
    model.load_state_dict(small_unet().state_dict())
    model(torch.randn(1, 4, 8, 8), torch.tensor([1]), torch.randn(1, 2, 8))
    assert seen == [LowPrecisionGroupNorm]


@pytest.mark.parametrize(
    "options, kinds",
    [
        ({}, {LowPrecisionGroupNorm, LowPrecisionLayerNorm}),
        ({"layer_norm": False}, {LowPrecisionGroupNorm, nn.LayerNorm}),
        ({"group_norm": False}, {nn.GroupNorm, LowPrecisionLayerNorm}),
    ],
)
def test_the_kinds_that_are_asked_for(options, kinds):
    model = small_unet()
    lower_norms(model, **options)
    assert {type(m) for m in model.modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm))} == kinds


@pytest.mark.parametrize("pattern", ["network.mid_block", r"network\.mid_.*"])
def test_the_part_that_is_asked_for(pattern):
    model = small_unet()
    count = lower_norms(model, modules=pattern)
    changed = [name for name, m in model.named_modules() if type(m) in (LowPrecisionGroupNorm, LowPrecisionLayerNorm)]
    assert len(changed) == count > 0 and all(name.startswith("network.mid_block.") for name in changed)


@pytest.mark.parametrize(
    "module, options, message",
    [
        (nn.Linear(2, 2), {}, "has no plain GroupNorm or LayerNorm$"),
        (nn.Sequential(nn.LayerNorm(2)), {"layer_norm": False}, "no plain GroupNorm$"),
        (nn.Sequential(nn.LayerNorm(2)), {"layer_norm": False, "group_norm": False}, "are both false"),
        (nn.Sequential(nn.LayerNorm(2)), {"modules": "unet"}, "starts with 'unet'; there are 1, such as 0$"),
        (nn.Sequential(nn.LayerNorm(2)), {"modules": "("}, "'\\(' is no regular expression"),
    ],
)
def test_nothing_to_change_is_an_error(module, options, message):
    with pytest.raises(ValueError, match=message):
        lower_norms(module, **options)


def test_twice_is_an_error():
    model = nn.Sequential(nn.LayerNorm(2))
    lower_norms(model)
    with pytest.raises(ValueError, match="nothing to change"):
        lower_norms(model)


def test_the_lever(capsys):
    task = nn.Sequential(nn.LayerNorm(2))
    lever = LowPrecisionNorms(task)
    with pytest.raises(ValueError, match="fp32 without autocast.*amp_bf16"):
        lever.change_modules(FakeRun(task, precision="fp32"))
    run = FakeRun(task, precision="amp_bf16")
    lever.change_modules(run)
    assert run.settings == {"low_precision_norms": 1} and capsys.readouterr().out == "low_precision_norms: 1 norms\n"


def test_the_loss_curve_is_that_of_32_bit_norms():
    """30 updates under bfloat16 autocast: each loss within 2% of that with 32-bit norms, and both learn."""
    plain = small_unet()
    lowered = copy.deepcopy(plain)
    widen_norms(plain)
    lower_norms(lowered)
    curves = []
    for model in (plain, lowered):
        generator = torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for _ in range(30):
            clean = torch.ones(4, 4, 8, 8) * torch.tensor([1.0, -1.0, 0.5, 0.0]).view(1, 4, 1, 1)
            noise = torch.randn(clean.shape, generator=generator)
            text = torch.zeros(4, 2, 8)
            with torch.autocast("cpu", torch.bfloat16):
                predicted = model(clean + noise, torch.zeros(4, dtype=torch.long), text)
            loss = (predicted.float() - noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    assert curves[0][-5:].mean() < 0.7 * curves[0][0]
    difference = ((curves[1] - curves[0]).abs() / curves[0]).max()
    assert 0 < difference < 0.02


def test_a_recipe_without_autocast_is_told(small_recipe, tmp_path):
    from recipes.engines.composer.trainer import build_trainer

    recipe = small_recipe(tmp_path, "algorithms.low_precision_norms={name: low_precision_norms, modules: denoiser}")
    with pytest.raises(ValueError, match="fp32 without autocast"):
        build_trainer(recipe)
