"""Products with 8-bit factors: equal to products of the restored numbers, near to the exact ones, and never silent."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recipes.algorithms.modules import fp8
from recipes.algorithms.modules.fp8 import BACKWARD, FORWARD, Fp8, Fp8Linear, check_capability, product, quantise
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.autoregressive.transformer import Unembedding
from tests.recipes.training.fake_run import FakeRun
from tests.stub_gpu import needs_stub_gpu

DIGITS = {FORWARD: 3, BACKWARD: 2}  # explicit bits of the significand


def small(width=32):
    torch.manual_seed(0)
    sizes = {"text_positions": 3, "text_vocabulary": 11, "side": 2, "codes": 7, "kernel": 3}
    return Autoregressive(layers=2, width=width, heads=2, **sizes)


def linear(rows=24, inside=48, outside=32):
    torch.manual_seed(0)
    layer = nn.Linear(inside, outside)
    fast = copy.deepcopy(layer)
    fast.__class__ = Fp8Linear
    return layer, fast, torch.randn(rows, inside), torch.randn(rows, outside) * 1e-3


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
@given(seed=st.integers(0, 10**6), exponent=st.integers(-90, 90), spread=st.floats(0.0, 8.0))
@settings(max_examples=40)
def test_numbers_are_rounded_once_relative_to_the_largest(dtype, seed, exponent, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, generator=generator) * torch.exp(spread * torch.randn(50, generator=generator))
    x = (x * 2.0**exponent).clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    q, factor = quantise(x, dtype)
    assert q.dtype == dtype and torch.isfinite(q.float()).all()
    restored = q.double() * factor.double()
    # Half a unit in the last place, or half of the smallest number of the format. Some 32-bit roundings come on top.
    smallest = torch.finfo(dtype).smallest_normal * 2.0 ** -DIGITS[dtype] * factor.double()
    allowed = torch.maximum(x.double().abs() * 2.0 ** -(DIGITS[dtype] + 1), smallest / 2)
    assert ((restored - x.double()).abs() <= allowed * (1 + 1e-5)).all()
    assert restored.abs().max().item() == pytest.approx(x.abs().max().item(), rel=1e-5)


def test_zeros_and_values_that_are_not_finite():
    q, factor = quantise(torch.zeros(4), FORWARD)
    assert not q.float().any() and torch.isfinite(factor)
    for bad in (torch.inf, torch.nan):
        q, factor = quantise(torch.tensor([1.0, bad]), BACKWARD)
        assert (q.float() * factor).isnan().all()  # an overflow must reach whoever looks for it


def test_factors_are_no_views(monkeypatch):
    """The compiler of torch 2.11 looks at the memory behind a view that a GPU's product is given, and fails."""
    seen = []
    monkeypatch.setattr(fp8, "product", lambda *given, **options: seen.extend(given[2]) or product(*given, **options))
    _, fast, x, slope = linear()
    (fast(x.requires_grad_()) * slope).sum().backward()
    assert len(seen) == 6 and all(factor.shape == () and not factor._is_view() for factor in seen)


def test_a_step_is_three_products_of_restored_numbers():
    _, fast, x, slope = linear()
    x.requires_grad_()
    y = fast(x)
    y.backward(slope)

    def restored(values, dtype):
        q, factor = quantise(values.detach(), dtype)
        return q.double() * factor.double()

    x8, w8, g8 = restored(x, FORWARD), restored(fast.weight, FORWARD), restored(slope, BACKWARD)
    # 32-bit sums of some ten products
    for found, exact in (
        (y, x8 @ w8.T + fast.bias.double()),
        (x.grad, g8 @ w8),
        (fast.weight.grad, g8.T @ x8),
        (fast.bias.grad, slope.double().sum(0)),
    ):
        assert (found - exact).abs().max() < 2e-6 * exact.abs().max()


def test_it_is_near_to_the_exact_layer():
    layer, fast, x, slope = linear()
    results = []
    for module in (layer, fast):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(slope)
        results.append([y, leaf.grad, module.weight.grad])
    # Factors are off by up to 2^-4 and 2^-3 of each number, by a third of that on average, with either sign.
    for (one, other), limit in zip(zip(*results, strict=True), (0.05, 0.08, 0.08), strict=True):
        assert 1e-3 < (one - other).norm() / one.norm() < limit


@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_numbers_of_rows_under_autocast(rows, dtype):
    _, fast, x, _ = linear(rows)
    x = x.to(dtype).reshape(1, rows, -1).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = fast(x)
    assert y.dtype == dtype and y.shape == (1, rows, 32)
    y.sum().backward()
    assert x.grad.dtype == dtype and x.grad.shape == x.shape
    assert fast.weight.grad.dtype == fast.bias.grad.dtype == torch.float32


def test_one_vector_is_a_row():
    _, fast, x, _ = linear(1)
    torch.testing.assert_close(fast(x[0]), fast(x)[0], rtol=0, atol=0)


def test_without_gradients_it_is_an_ordinary_layer():
    layer, fast, x, _ = linear()
    with torch.no_grad():
        assert torch.equal(fast(x), layer(x))
    assert torch.equal(fast.eval()(x), layer(x)) and not torch.equal(fast.train()(x), layer(x))


def test_the_lever_changes_the_matrices_of_blocks():
    task, plain = small(), small()
    run = FakeRun(task)
    Fp8(task).change_modules(run)
    assert run.settings == {"fp8": 12}
    assert list(task.state_dict()) == list(plain.state_dict())
    assert type(task.network.unembedding) is Unembedding
    batch = {"text": torch.tensor([[1, 2, 3], [4, 5, -1]]), "image": torch.arange(8).reshape(2, 4) % 7}
    for model in (task, plain):
        nn.init.normal_(model.network.unembedding.weight, generator=torch.Generator().manual_seed(1))
        model(batch)["total"].backward()
    gradients = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (task, plain)]
    assert 0 < (gradients[0] - gradients[1]).norm() < 0.1 * gradients[1].norm()


class OwnProduct(nn.Module):
    """Multiplies by a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.zeros(16, 48)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return nn.functional.linear(x, self.matrix, self.bias)


def test_the_share_of_matrices_that_it_changes_is_logged(caplog):
    """It did nothing for others, and nothing said so."""
    block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), OwnProduct())
    task = SimpleNamespace(blocks=lambda: [block])
    with caplog.at_level("INFO", logger="precompose"):
        Fp8(task).change_modules(FakeRun())
    assert "fp8: 1 linear layers, which have 25% of the elements of all matrices in the blocks; emulated" in caplog.text


def test_a_block_compiles_as_one_graph():
    torch._dynamo.reset()
    task = small()
    Fp8(task).change_modules(FakeRun(task))
    block = task.blocks()[1]
    x = torch.randn(2, 7, 32, requires_grad=True)
    results = []
    for forward in (block.forward, torch.compile(block.forward, backend="aot_eager", fullgraph=True, dynamic=False)):
        (gradient,) = torch.autograd.grad(forward(x).square().sum(), x)
        results.append(gradient)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@needs_stub_gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_block_compiles_for_a_gpu(stub_gpu):
    """At its real size, at which maxima over a tensor are divided over programs."""
    done = stub_gpu(Path(__file__).with_name("fp8_on_stub_gpu.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    got, of = done.stdout.split("gradients: ")[1].split(" of ")
    assert int(got) == int(of)


def test_what_is_refused():
    with pytest.raises(ValueError, match="fp8: nothing to change: the blocks of Autoregressive have no linear layers"):
        Fp8(small(width=20)).change_modules(FakeRun())
    with pytest.raises(ValueError, match=r"compute capability 8.0, and 8-bit products need 8.9 \(Ada, Hopper"):
        check_capability((8, 0))
    for able in ((8, 9), (9, 0), (10, 0)):
        check_capability(able)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit tensor cores"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("first", [FORWARD, BACKWARD])
def test_products_on_a_gpu_are_those_of_a_cpu(first, dtype):
    torch.manual_seed(0)
    (a, one), (b, other) = quantise(torch.randn(48, 64), first), quantise(torch.randn(32, 64), FORWARD)
    factors = (one, other)
    expected = product(a, b.T, factors, torch.float32)
    for fast in (False, True):
        found = product(a.cuda(), b.cuda().T, tuple(factor.cuda() for factor in factors), dtype, fast)
        assert found.dtype == dtype
        # Roundings of the result, and of sums that tensor cores keep with some 14 bits.
        torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=1e-2 * expected.abs().max().item())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit tensor cores"
)
def test_a_layer_on_a_gpu_trains_as_on_a_cpu():
    _, fast, x, slope = linear(rows=30)
    results = []
    for device in ("cpu", "cuda"):
        layer, leaf = copy.deepcopy(fast).to(device), x.clone().to(device).requires_grad_()
        y = layer(leaf)
        y.backward(slope.to(device))
        results.append([t.cpu() for t in (y, leaf.grad, layer.weight.grad, layer.bias.grad)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-2 * one.abs().max().item())
