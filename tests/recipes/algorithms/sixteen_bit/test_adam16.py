"""AdamW with 16-bit moments: PyTorch's AdamW where nothing is rounded, the formats where it is, exact on resuming.

Shards of FSDP2 are tested on the ranks that powersgd/test_lever.py starts.
"""

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.algorithms.optimizers import adam16
from recipes.algorithms.sixteen_bit.adam16 import MOMENTS, Adam16, adamw_update
from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9, VARIANCE_0_6_10
from recipes.config.build import build
from recipes.config.components import COMPONENTS
from recipes.config.schema import Component
from recipes.models.task import Task
from tests.recipes.algorithms.residual import Residual, train, vector

ARGUMENTS = {"lr": 3e-3, "betas": (0.9, 0.96), "eps": 1e-8, "weight_decay": 0.045}


def test_with_32_bit_moments_it_is_adamw():
    ours, theirs = Residual(), Residual()
    first = vector(ours)
    train(ours, Adam16(ours.parameters(), **ARGUMENTS, variance_clip=None, moment_bits=32), 20)
    train(theirs, torch.optim.AdamW(theirs.parameters(), **ARGUMENTS), 20)
    # 20 steps of 3e-3 moved weights by up to 0.06; the two round differently in the last place of each step.
    assert (vector(ours) - vector(theirs)).abs().max() < 2e-6
    assert (vector(ours) - first).abs().max() > 0.04


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_that_of_64_bit_arithmetic_with_rounded_moments(compiled):
    """The same code with the formats in place, against one that is written out."""
    torch.manual_seed(0)
    parameter, gain = nn.Parameter(torch.randn(300, 7)), nn.Parameter(torch.ones(9))
    groups = [{"params": [parameter]}, {"params": [gain], "moment_bits": 32}]
    optimizer = Adam16(groups, **ARGUMENTS, compiled=compiled)
    reference = nn.Parameter(torch.ones(9))
    adamw = torch.optim.AdamW([reference], **ARGUMENTS)
    want = parameter.detach().double()
    mean, variance = torch.zeros(300, 7), torch.zeros(300, 7)
    for step in range(1, 9):
        # Gradients over the whole range, those beyond the clip of the variance too.
        parameter.grad = torch.randn(300, 7) * 2.0 ** torch.randint(-40, 5, (300, 7))
        gradient = parameter.grad.double()
        new_mean = mean.double() * 0.9 + gradient * (1 - 0.9)
        new_variance = (variance.double() * 0.96 + gradient**2 * (1 - 0.96)).clamp(max=5)
        root = (new_variance / (1 - 0.96**step)).sqrt() + 1e-8
        want = want * (1 - 3e-3 * 0.045) - 3e-3 * new_mean / (1 - 0.9**step) / root
        gain.grad = reference.grad = torch.randn(9)
        optimizer.step()
        adamw.step()
        assert (gain - reference).abs().max() < 1e-6
        assert (parameter.detach() - want).abs().max() < 1e-6
        state = optimizer.state[parameter]
        mean = MEAN_1_6_9.decode(state["mean"].view(torch.int16).squeeze(-1))
        variance = VARIANCE_0_6_10.decode(state["variance"].view(torch.int16).squeeze(-1))
        # Half of a last place, and the rounding of 32-bit arithmetic before it.
        assert ((mean - new_mean).abs() <= new_mean.abs() * (2**-10 + 1e-6) + 2**-69).all()
        assert ((variance - new_variance).abs() <= new_variance * (2**-11 + 1e-6) + 2**-71).all()
        want = parameter.detach().double()
    assert (variance == 5).any()


def test_gains_biases_and_embeddings_keep_32_bits():
    model = Residual()
    optimizer = adam16(model.parameters(), model, lr=1e-3, compiled=False)
    train(model, optimizer, 1)
    names = {id(p): name for name, p in model.named_parameters()}
    short = {names[id(p)] for p, state in optimizer.state.items() if state["mean"].dtype == torch.uint8}
    assert short == {f"layers.{i}.branch.{j}.weight" for i in range(2) for j in (1, 3)}
    assert {state["variance"].dtype for state in optimizer.state.values()} == {torch.uint8, torch.float32}


def test_a_recipe_names_it():
    model = Residual()
    arguments = {"lr": 1e-3, "variance_clip": None, "compiled": False}
    component = Component("optimizer", "adam16", arguments, COMPONENTS["optimizer"]["adam16"], "optimizer")
    built = build(component, parameters=list(model.parameters()), task=model)
    assert isinstance(built, Adam16)
    assert [(group["moment_bits"], len(group["params"])) for group in built.param_groups] == [(16, 4), (32, 11)]
    assert built.defaults["variance_clip"] is None


def test_its_memory():
    model = Residual()
    optimizer = adam16(model.parameters(), model, lr=1e-3, compiled=False)
    train(model, optimizer, 1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            bits = 8 * (state["mean"].nbytes + state["variance"].nbytes)
            assert bits == 2 * group["moment_bits"] * parameter.numel()


def test_it_learns_as_adamw_does():
    ours, theirs = Residual(), Residual()
    losses = train(ours, adam16(ours.parameters(), ours, lr=3e-3, compiled=False), 80)
    reference = train(theirs, torch.optim.AdamW(theirs.parameters(), **ARGUMENTS), 80)
    assert losses[0] > 2 and reference[-1] < 0.5
    assert losses[-1] < 1.2 * reference[-1]


@pytest.mark.parametrize("through", ["memory", "file"])
def test_resuming_changes_nothing(through):
    model = Residual()
    optimizer = adam16(model.parameters(), model, lr=3e-3, compiled=False)
    train(model, optimizer, 5)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if through == "file":
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    again = Residual()
    again.load_state_dict(saved["model"])
    resumed = adam16(again.parameters(), again, lr=1.0, compiled=False)
    resumed.load_state_dict(saved["optimizer"])
    for a, b in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        for name in a:
            assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name])
    train(model, optimizer, 5, start=5)
    train(again, resumed, 5, start=5)
    assert torch.equal(vector(model), vector(again))


@given(codes=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=6, max_size=6))
@settings(max_examples=50)
def test_any_codes_are_loaded_as_they_are(codes):
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer, other = Adam16([parameter], lr=1e-3), Adam16([nn.Parameter(torch.zeros(2, 3))], lr=1e-3)
    parameter.grad = torch.zeros(2, 3)
    optimizer.step()
    given_codes = torch.tensor(codes, dtype=torch.int16).view(2, 3, 1).view(torch.uint8)
    optimizer.state[parameter]["mean"].copy_(given_codes)
    other.load_state_dict(optimizer.state_dict())
    (state,) = other.state.values()
    assert torch.equal(state["mean"], given_codes)


class Formats(TorchDispatchMode):
    """Keeps the number formats of all results that have as many elements as the moments of `SHAPE`."""

    SHAPE = (64, 32)

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == 2 * math.prod(self.SHAPE):
            self.seen.add(result.dtype)
        return result


def test_loading_takes_no_more_memory_than_the_moments():
    """PyTorch's own loading casts states to the dtype of their parameters: 4 bytes per byte."""
    parameter = nn.Parameter(torch.zeros(Formats.SHAPE))
    parameter.grad = torch.ones(Formats.SHAPE)
    optimizer = Adam16([parameter], lr=1e-3)
    optimizer.step()
    with Formats() as formats:
        Adam16([parameter], lr=1e-3).load_state_dict(optimizer.state_dict())
    assert formats.seen == {torch.uint8}


def test_any_memory_order():
    """channels_last weights, and gradients and checkpoints in another order than the parameter's."""
    torch.manual_seed(0)
    values, gradients = torch.randn(4, 6, 3, 3), torch.randn(3, 4, 6, 3, 3)
    found = []
    for format_of_values in (torch.contiguous_format, torch.channels_last):
        for format_of_gradients in (torch.contiguous_format, torch.channels_last):
            parameter = nn.Parameter(values.clone(memory_format=format_of_values))
            optimizer = Adam16([parameter], lr=0.1)
            for number, gradient in enumerate(gradients):
                parameter.grad = gradient.clone(memory_format=format_of_gradients)
                optimizer.step()
                if number == 0:
                    state = optimizer.state_dict()
                    for moment in ("mean", "variance"):
                        state["state"][0][moment] = state["state"][0][moment].contiguous()
                    optimizer.load_state_dict(state)
            assert parameter.is_contiguous(memory_format=format_of_values)
            found.append(parameter.detach().contiguous())
    assert all(torch.equal(found[0], other) for other in found)


def test_parameters_without_gradients_stand_still():
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Adam16([a, b], lr=0.1)
    a.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(b, torch.ones(2, 2)) and b not in optimizer.state
    assert not torch.equal(a, torch.ones(2, 2))
    saved = optimizer.state_dict()
    saved["state"][1] = {}  # as a checkpoint is read
    other = Adam16([a, b], lr=0.1)
    other.load_state_dict(saved)
    assert a in other.state and b not in other.state


def test_tensors_at_one_step_are_updated_together(monkeypatch):
    """On a GPU by one kernel. Those that get their first gradient later are corrected for fewer steps."""
    seen = []
    monkeypatch.setattr(Adam16, "_update", lambda self, _, step, device, tensors: seen.append((step, len(tensors))))
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    optimizer = Adam16(parameters, lr=0.1)
    for with_gradients in (2, 3):
        for parameter in parameters[:with_gradients]:
            parameter.grad = torch.ones(2, 2)
        optimizer.step()
    assert seen == [(1, 2), (2, 2), (1, 1)]


def test_the_update_in_each_format_differs_by_its_rounding_alone():
    torch.manual_seed(0)
    gradient, scalars = torch.randn(1000), [torch.tensor(x) for x in (0.0, 1e-2, 0.2)]
    results = []
    for formats in ((FLOAT_32, FLOAT_32), (MEAN_1_6_9, VARIANCE_0_6_10)):
        values = torch.zeros(1000)
        codes = [torch.zeros(1000, dtype=fmt.dtype) for fmt in formats]
        for _ in range(2):
            adamw_update(values, gradient, *codes, *scalars, *formats, 0.9, 0.96, 1e-8, 5.0)
        results.append(values)
    assert not torch.equal(*results)
    assert (results[0] - results[1]).abs().max() < 2**-9 * results[0].abs().max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "must not be negative"),
        ({"betas": (0.9, 0.9996)}, r"decays by less than 0-6-10 can represent; use less than 0.999512"),
        ({"betas": (0.9991, 0.96)}, r"betas.0 = 0.9991 decays by less than 1-6-9"),
        ({"betas": (0.9, 1.0)}, r"betas.1 must lie in \[0, 1\)"),
        ({"variance_clip": 9.0}, "variance_clip 9.0 is above 7.99609375"),
        ({"variance_clip": 0.0}, "variance_clip must be above 0"),
        ({"moment_bits": 8}, "moment_bits is 16 or 32, got 8"),
    ],
)
def test_values_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Adam16([nn.Parameter(torch.zeros(2, 2))], **{"lr": 1e-3, **arguments})


def test_other_parameters_and_checkpoints_are_refused():
    with pytest.raises(ValueError, match=r"is torch.bfloat16; keep parameters in 32-bit"):
        Adam16([nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))], lr=1e-3)
    with pytest.raises(ValueError, match="does not say which of its modules are blocks"):
        adam16([nn.Parameter(torch.zeros(2, 2))], Task(), lr=1e-3, compiled=False)
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.ones(2, 3)
    optimizer = Adam16([parameter], lr=1e-3, moment_bits=32)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["moment_bits"] = 16
    with pytest.raises(ValueError, match=r"has shape \(2, 3\) in the checkpoint, not \(2, 3, 2\)"):
        Adam16([parameter], lr=1e-3).load_state_dict(saved)


def test_a_decay_that_a_moment_can_show_lets_it_fall():
    """Just below the refused decay, a variance falls to where 0-6-10 has no more bits, in place of standing still."""
    fmt = VARIANCE_0_6_10
    variance = fmt.decode(torch.arange(2**15, dtype=torch.int32).to(torch.int16))[4096:]
    assert (fmt.decode(fmt.encode(variance * 0.99951)) < variance).float().mean() > 0.999
    assert (fmt.decode(fmt.encode(variance * 0.9998)) < variance).float().mean() < 0.6


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_slow_decays_are_exact(device):
    """The difference of 1 and a decay of 32 bits would be wrong by 2e-4 of it."""
    parameter = nn.Parameter(torch.zeros(100, device=device))
    optimizer = Adam16([parameter], lr=1e-3, betas=(0.999, 0.9999), weight_decay=0.0, moment_bits=32)
    parameter.grad = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(device)
    optimizer.step()
    mean, variance = (optimizer.state[parameter][name] for name in MOMENTS)
    torch.testing.assert_close(mean, 1e-3 * parameter.grad, rtol=1e-6, atol=0)
    torch.testing.assert_close(variance, 1e-4 * parameter.grad.square(), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_is_the_step_of_the_cpu(compiled):
    cpu, gpu = Residual(), Residual().cuda()
    optimizers = [adam16(m.parameters(), m, lr=3e-3, compiled=c) for m, c in ((cpu, False), (gpu, compiled))]
    for step in range(10):
        train(cpu, optimizers[0], 1, step)
        for ours, other in zip(gpu.parameters(), cpu.parameters(), strict=True):
            ours.grad = other.grad.cuda()
        optimizers[1].step()
    assert (vector(gpu).cpu() - vector(cpu)).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_a_step_does_not_wait(compiled):
    """The device's queue holds the backward pass when the step begins."""
    model = Residual().cuda()
    optimizer = adam16(model.parameters(), model, lr=3e-3, compiled=compiled)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the moments and the tables that never change
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
