"""The Triton kernels of GroupNorm and GEGLU on the CPU. Run by tests/recipes/test_kernels.py."""

import copy
import os

import pytest
import torch
from torch import nn

from recipes.algorithms.modules.fused_group_norm import fuse_group_norms
from recipes.algorithms.modules.low_precision_norms import LowPrecisionGroupNorm, lower_norms
from recipes.models.kernels import fused_norm
from recipes.models.kernels.fused_norm import Case, FusedGroupNorm, Times, fuse
from recipes.models.kernels.geglu import geglu
from recipes.models.kernels.geglu import reference as plain_geglu
from recipes.models.kernels.group_norm_kernels import backward_with, forward_with, make_plan
from recipes.models.kernels.group_norm_silu import INTERPRETED, group_norm_silu
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.models.kernels.plain import reference

# Largest difference, as a share of the largest number. The interpreter cuts to bfloat16 where a GPU rounds: 2^-7.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-7}
SHAPES = [  # (N, C, H, W), groups, splits
    ((2, 6, 3, 5), 3, None),
    ((1, 5, 1, 1), 1, None),
    ((3, 40, 7, 5), 4, 3),
    ((1, 64, 9, 13), 32, 2),
    ((2, 320, 4, 4), 32, None),
    ((1, 12, 33, 17), 2, 16),
    ((1, 160, 6, 6), 1, 4),
    ((2, 34, 1, 70), 2, 2),
]


def make_case(shape, dtype, out, parameters=torch.float32, mean=0.0):
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(shape, generator=generator) * 2 + mean).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, shape[1], generator=generator).to(parameters)
    dy = torch.randn(shape, generator=generator).to(out)
    return x, weight, bias, dy.contiguous(memory_format=torch.channels_last)


def gradients(function, x, weight, bias, dy, *arguments):
    inputs = [
        tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (x, weight, bias)
    ]
    y = function(*inputs, *arguments)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def check(actual, expected, dtypes):
    for one, other, dtype in zip(actual, expected, dtypes, strict=True):
        assert one.dtype == other.dtype
        difference = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-6)
        assert difference <= TOLERANCE[dtype], f"{difference:.2e} in {dtype}"


def test_the_interpreter_is_on():
    assert os.environ["TRITON_INTERPRET"] == "1" and INTERPRETED


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("shape, groups, splits", SHAPES)
def test_forward_and_backward(shape, groups, splits, silu):
    x, weight, bias, dy = make_case(shape, torch.float32, torch.float32)
    plan = make_plan(shape[0], shape[2] * shape[3], shape[1], groups, 1, splits, tile=512)
    assert splits is None or plan.splits > 1
    y, stats = forward_with(plan, x, weight, bias, groups, 1e-5, silu, torch.float32)
    dx, (dbias, dweight) = backward_with(plan, dy, x, weight, bias, stats, groups, silu)
    assert y.is_contiguous(memory_format=torch.channels_last) and dx.is_contiguous(memory_format=torch.channels_last)
    expected = gradients(reference, x, weight, bias, dy, groups, 1e-5, silu)
    if shape == (1, 5, 1, 1):  # five numbers: the input's gradient is a small difference of large ones
        torch.testing.assert_close(dx, expected[1], atol=1e-5, rtol=1e-4)
        expected[1] = dx
    check([y, dx, dweight, dbias], expected, [torch.float32] * 4)


@pytest.mark.parametrize(
    "dtype, out, parameters",
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes(dtype, out, parameters):
    case = make_case((2, 40, 6, 7), dtype, out, parameters)
    actual = gradients(group_norm_silu, *case, 4, 1e-5, True, out)
    expected = gradients(reference, *case, 4, 1e-5, True, out)
    check(actual, expected, [out, out if out == torch.bfloat16 else dtype, parameters, parameters])


@pytest.mark.parametrize("splits", [1, 4])
def test_a_mean_far_from_zero_costs_no_precision(splits):
    x, weight, bias, _ = make_case((1, 16, 16, 16), torch.float32, torch.float32, mean=4000.0)
    plan = make_plan(1, 256, 16, 2, 1, splits, tile=512)
    y, _ = forward_with(plan, x, weight, bias, 2, 1e-5, False, torch.float32)
    exact = nn.functional.group_norm(x.double(), 2, weight.double(), bias.double())
    assert (y - exact).abs().max() < 1e-3  # the input's own spacing is 2e-4


def test_a_contiguous_input_and_gradient_are_taken():
    x, weight, bias, dy = (tensor.contiguous() for tensor in make_case((2, 8, 5, 3), torch.float32, torch.float32))
    actual = gradients(group_norm_silu, x, weight, bias, dy, 2)
    check(actual, gradients(reference, x, weight, bias, dy, 2), [torch.float32] * 4)


def test_the_same_result_every_time():
    case = make_case((2, 40, 9, 9), torch.bfloat16, torch.bfloat16)
    for one, other in zip(gradients(group_norm_silu, *case, 4), gradients(group_norm_silu, *case, 4), strict=True):
        assert torch.equal(one, other)


def test_operators_as_torch_compile_takes_them():
    x, weight, bias, dy = make_case((2, 8, 4, 3), torch.float32, torch.float32)
    inputs = (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), 2, 1e-5, True, torch.bfloat16)
    checks = ("test_schema", "test_faketensor")  # compiling, below, checks the rest
    torch.library.opcheck(torch.ops.precompose.group_norm_silu.default, inputs, test_utils=checks)
    compiled = torch.compile(group_norm_silu, backend="aot_eager", fullgraph=True)
    actual = gradients(compiled, x, weight, bias, dy, 2)
    check(actual, gradients(group_norm_silu, x, weight, bias, dy, 2), [torch.float32] * 4)


def small_unet():
    torch.manual_seed(0)
    network = unet(channels=[8, 16], attention=[False, True], heads=[1, 2], text_width=6, norm_groups=4, blocks=1)
    return network.to(memory_format=torch.channels_last)


def batch():
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(1, 4, 4, 4, generator=generator),
        torch.tensor([700]),
        torch.randn(1, 3, 6, generator=generator),
    )


def test_a_unet_gives_the_same_and_keeps_its_names():
    plain = small_unet()
    fused = copy.deepcopy(plain)
    parameters = dict(fused.named_parameters())
    # Two a residual block (4 + 2 in the middle + 2 + 2 up, at one block a level), one a transformer, the last one.
    assert fuse_group_norms(fused, measured=False) == sum(isinstance(m, nn.GroupNorm) for m in plain.modules())
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert all(parameter is parameters[name] for name, parameter in fused.named_parameters())
    outputs = []
    for network in (plain, fused):
        y = network(*batch())
        y.square().mean().backward()
        outputs.append(y.detach())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_with_autocast_low_precision_norms_and_checkpointing():
    plain = small_unet()
    fused = copy.deepcopy(plain)
    lower_norms(fused)
    fuse_group_norms(fused, measured=False)
    fused.network.enable_gradient_checkpointing()
    losses, norms = [], []
    for network in (plain, fused):
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(*batch()).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in network.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert (norms[1] - norms[0]).norm() / norms[0].norm() < 0.05


def test_the_norm_gives_autocasts_dtype():
    norm = nn.GroupNorm(2, 8)
    fuse(norm, silu=True, measured=False)
    x = torch.randn(2, 8, 3, 3)
    assert norm(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    assert norm(torch.randn(2, 8, 5)).shape == (2, 8, 5)  # not a picture: as before


@pytest.mark.parametrize("fused_ms, used", [(1.0, True), (1.99, False), (3.0, False)])
@pytest.mark.parametrize("compiled", [False, True])
def test_auto_takes_the_faster_and_measures_once(monkeypatch, fused_ms, used, compiled):
    torch._dynamo.reset()  # or a graph of another parameter, with its choice in it, would be taken
    measured, taken = [], []
    monkeypatch.setattr(fused_norm, "TIMES", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(fused_norm, "measure", lambda case, _: measured.append(case) or Times(fused_ms, 2.0))
    norm = nn.GroupNorm(2, 8)
    lower_norms(nn.Sequential(norm))
    fuse(norm, silu=True, measured=True)
    x = torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    expected = nn.functional.silu(LowPrecisionGroupNorm.forward(norm, x))
    forward = torch.compile(norm, backend="eager", fullgraph=True) if compiled else norm
    if not compiled:
        monkeypatch.setattr(fused_norm, "group_norm_silu", lambda *a: taken.append(a) or group_norm_silu(*a))
    for _ in range(2):
        torch.testing.assert_close(forward(x), expected, rtol=1e-5, atol=1e-5)
    case = Case(LowPrecisionGroupNorm, (2, 8, 3, 3), 2, torch.float32, torch.float32, False, True)
    assert measured == [case] and fused_norm.TIMES[case].fused_wins == used
    assert compiled or bool(taken) == used
    forward(torch.randn(2, 8, 3, 3))  # contiguous: PyTorch's, not measured
    assert len(measured) == 1 and isinstance(norm, FusedGroupNorm)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3)])
def test_a_batch_without_values(shape, compiled):
    torch._dynamo.reset()
    norm = nn.GroupNorm(2, 8)
    plain = copy.deepcopy(norm)
    fuse(norm, silu=True, measured=False)
    forward = torch.compile(norm, backend="eager", fullgraph=True) if compiled else norm
    with torch.autocast("cpu", torch.bfloat16):
        y = forward(torch.empty(shape))
        y.sum().backward()
        nn.functional.silu(plain(torch.empty(shape))).sum().backward()
    assert y.shape == shape and y.dtype == torch.bfloat16
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad, equal_nan=True)
    torch.testing.assert_close(norm.bias.grad, plain.bias.grad, equal_nan=True)


def test_an_error_of_the_measurement_is_raised(monkeypatch):
    monkeypatch.setattr(fused_norm, "TIMES", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def fail(case, device):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(fused_norm, "measure", fail)
    norm = nn.GroupNorm(2, 8)
    fuse(norm, silu=True, measured=True)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        norm(torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 2560), (1, 2), (7, 34), (0, 4)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_geglu(shape, dtype):
    """PyTorch computes the reference in 32 bits of the same numbers; 16 bits round once."""
    generator = torch.Generator().manual_seed(3)
    x = (2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    dy = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    actual = geglu(x)
    actual = [actual, *torch.autograd.grad(actual, x, dy)]
    exact = x.detach().float().requires_grad_()
    expected = plain_geglu(exact)
    expected = [expected, *torch.autograd.grad(expected, exact, dy.float())]
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        if one.numel():
            assert (one.float() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()


def test_geglu_takes_inputs_and_gradients_that_are_no_runs_of_memory():
    x = torch.randn(6, 5, dtype=torch.float32).t().requires_grad_()
    (theirs,) = torch.autograd.grad(plain_geglu(x), x, torch.ones(3, 5).t())
    (own,) = torch.autograd.grad(geglu(x), x, torch.ones(3, 5).t())
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)
