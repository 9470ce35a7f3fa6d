"""GroupNorm and SiLU by Triton: by its compiler for Hopper and on a GPU. `norms_interpreted.py` runs the kernels on the
CPU."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recipes.models.kernels import fused_norm, group_norm_kernels
from recipes.models.kernels.device_graph import for_graph
from recipes.models.kernels.fused_norm import Case, Times
from recipes.models.kernels.group_norm_kernels import SPLITS, make_plan
from recipes.models.kernels.group_norm_silu import group_norm_silu
from tests.pretended_gpu import PretendedGPU
from tests.recipes.models.kernels.plain import reference

# (N, C, rows, G): SD2's at 256 and 512 pixels, and odd ones.
SHAPES = [(256, 320, 1024, 32), (16, 960, 1024, 32), (4, 1280, 64, 32), (96, 2560, 64, 32), (8, 320, 4096, 32)]
SHAPES += [(1, 5, 1, 1), (2, 34, 70, 2), (3, 7, 1000, 7), (1, 4096, 300, 2)]
without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("samples, channels, rows, groups", SHAPES)
def test_a_plan_covers_everything_once(samples, channels, rows, groups, processors):
    plan = make_plan(samples, rows, channels, groups, processors)
    group = channels // groups
    assert plan.width >= plan.groups * group and plan.width & (plan.width - 1) == 0
    assert plan.step & (plan.step - 1) == 0
    assert 1 <= plan.splits <= SPLITS
    assert (plan.splits - 1) * plan.rows < rows <= plan.splits * plan.rows
    assert plan.splits == 1 or plan.rows % plan.step == 0


def test_a_small_batch_shares_rows_and_a_large_one_does_not():
    assert make_plan(4, 1024, 320, 32, 132).splits > 1
    assert make_plan(256, 1024, 320, 32, 132).splits == 1
    assert make_plan(1, 64, 1280, 32, 132).splits == 1  # too few rows for a second launch


@pytest.mark.parametrize("sums, apply", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["_group_norm_forward", "_group_norm_backward"])
def test_the_kernels_compile_for_hopper(name, sums, apply, tmp_path, monkeypatch):
    """Triton compiles without a GPU. All of a picture is read and written 16 bytes at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(group_norm_kernels, name)
    plan = make_plan(16, 1024, 320, 32, 132)
    values = {"C": 320, "GROUP": 10, "PART": plan.groups, "PART_P2": 16, "WIDTH": plan.width, "STEP": plan.step}
    values |= {"SPLITS": plan.splits, "SPLITS_P2": triton.next_power_of_2(plan.splits)}
    values |= {"SUMS": sums, "APPLY": apply, "SILU": True}
    types = {
        "x": "*bf16",
        "y": "*bf16",
        "dy": "*bf16",
        "dx": "*bf16",
        "total_rows": "i32",
        "rows": "i32",
        "eps": "fp32",
    }
    signature = {arg: "constexpr" if arg in values else types.get(arg, "*fp32") for arg in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if signature[arg][0] in "*i"}
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": plan.warps})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert not apply or "st.global.v4.b32" in compiled.asm["ptx"]
    assert "b16" not in "".join(line for line in compiled.asm["ptx"].splitlines() if "global" in line)


@pytest.mark.parametrize("name", ["_group_norm_forward", "_group_norm_backward"])
def test_the_kernels_compile_for_a_grid_of_1_x_1(name, tmp_path, monkeypatch):
    """Triton makes an integer argument a constant of the kernel where it is 1, as the number of rows is there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(group_norm_kernels, name)
    plan = make_plan(2, 1, 64, 32, 132)
    values = {"C": 64, "GROUP": 2, "PART": plan.groups, "PART_P2": triton.next_power_of_2(plan.groups)}
    values |= {"WIDTH": plan.width, "STEP": plan.step, "SPLITS": 1, "SPLITS_P2": 1, "SILU": True}
    values |= {"SUMS": True, "APPLY": True, "total_rows": 1, "rows": plan.rows}
    assert plan.rows == plan.splits == 1
    signature = {arg: "constexpr" if arg in values else "*fp32" for arg in kernel.arg_names}
    signature |= {"eps": "fp32"} if "eps" in signature else {}
    source = ASTSource(kernel, signature, values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": plan.warps})
    assert len(compiled.asm["cubin"]) > 0


def test_what_the_kernels_do_not_take_is_said():
    x, weight = torch.randn(2, 8, 3, 3), torch.ones(8)
    with pytest.raises(ValueError, match="groups divide C; got x"):
        group_norm_silu(x, weight, weight, 3)
    with pytest.raises(ValueError, match="got {torch.float64}"):
        group_norm_silu(x.double(), weight, weight, 2)
    with pytest.raises(ValueError, match="need a GPU, x is on cpu"):
        group_norm_silu(x, weight, weight, 2)


@pytest.mark.parametrize("graphed", [False, True])
def test_in_a_graph_the_time_of_launches_does_not_count(graphed, monkeypatch):
    """On a small grid, the kernel takes the host longer to launch, and the GPU a third of the time."""
    gpu = PretendedGPU()
    gpu.install(monkeypatch, fused_norm)
    steps = {"fused": partial(gpu.run, 4e-4, 3e-5), "plain": partial(gpu.run, 2e-4, 9e-5)}
    times = Times(**fused_norm._interleaved(steps, graphed))
    assert times.fused_wins == graphed
    if graphed:
        assert (times.fused, times.plain) == pytest.approx((0.03, 0.09))


def test_a_norm_is_measured_for_graphs_by_itself(monkeypatch):
    """The same shape runs without graphs, too, as in a search for a microbatch."""
    measured = []
    monkeypatch.setattr(fused_norm, "TIMES", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(fused_norm, "measure", lambda case, _: measured.append(case) or Times(1.0, 2.0))
    values = (torch.nn.GroupNorm, (8, 64, 16, 16), 32, torch.bfloat16, torch.bfloat16, True, True)
    for _ in range(2):
        fused_norm.is_faster(*values)
        with for_graph():
            fused_norm.is_faster(*values)
    assert measured == [Case(*values), Case(*values, graphed=True)]


@pytest.mark.gpu
@without_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("shape, groups", [((4, 320, 32, 32), 32), ((64, 1280, 8, 8), 32), ((3, 34, 7, 13), 2)])
def test_on_a_gpu(shape, groups, silu, dtype):
    """Tolerances as shares of the largest number: 2^-7, 2e-3 and 1e-4 (sums in another order)."""
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda *size: torch.randn(*size, device="cuda", generator=generator)  # noqa: E731
    x, dy = (make(*shape).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(2))
    inputs = [x.requires_grad_(), make(shape[1]).requires_grad_(), make(shape[1]).requires_grad_()]
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2e-3, torch.float32: 1e-4}[dtype]
    results = []
    for function in (group_norm_silu, reference):
        y = function(*inputs, groups, 1e-5, silu)
        results.append([y, *torch.autograd.grad(y, inputs, dy)])
    assert results[0][0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max()


@pytest.mark.gpu
@without_gpu
@pytest.mark.parametrize("graphed", [False, True])
def test_measuring_on_a_gpu_leaves_the_random_numbers_alone(graphed):
    before = torch.cuda.get_rng_state()
    values = (torch.nn.GroupNorm, (8, 64, 16, 16), 32, torch.bfloat16, torch.bfloat16, True, True)
    with torch.no_grad(), for_graph() if graphed else nullcontext():
        fused_norm.is_faster(*values)
    times = fused_norm.TIMES[Case(*values, graphed=graphed)]
    assert 0 < times.fused < 1000 and 0 < times.plain < 1000
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.gpu
@without_gpu
def test_inductor_on_a_gpu():
    x = torch.randn(4, 64, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 64, device="cuda")
    compiled = torch.compile(lambda x: group_norm_silu(x * 2, weight, bias, 32) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), reference(x * 2, weight, bias, 32) + 1, rtol=1e-4, atol=1e-4)
