"""Sequence lengths and score matrices, counted in the real models, are those of closed forms; times have classes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional as F

from benchmarks import operators
from benchmarks.common import reporting
from benchmarks.common.attention_calls import (
    SPAN,
    WAYS,
    attention_by,
    in_one,
    scores_bytes,
    unet_scores_bytes,
    written_out,
)
from benchmarks.gpu_run.encoding import profiled
from benchmarks.gpu_run.numbers import vary
from recipes.checking.attention_kernels import naive
from recipes.models.autoregressive.masks import TokenLayout, dense_mask, visible
from recipes.models.autoregressive.sparse_attention import attend_in_two
from tests.stub_gpu import needs_stub_gpu

META = operators.Setting(torch.device("meta"), small=False)
SMALL = operators.Setting(torch.device("cpu"), small=True)
HEADS = (5, 10, 20, 20)


def levels(side):
    """Positions at the levels of each transformer block of Stable Diffusion's U-Net, in the order of the pass."""
    first = [side**2 // 4**n for n in range(4)]
    down = [positions for positions in first[:3] for _ in range(2)]
    up = [positions for positions in reversed(first[:3]) for _ in range(3)]
    return [*down, first[3], *up]


@pytest.fixture(scope="module")
def unet_calls():
    """Side of the latent -> the calls of the U-Net of Stable Diffusion 2."""
    return {
        resolution // 8: operators.recorded(operators.WORKLOADS[f"U-Net at {resolution}"](META))
        for resolution in (256, 512)
    }


@pytest.mark.parametrize("side", [32, 64])
def test_sequence_lengths_of_a_u_net_go_down_and_up(unet_calls, side):
    calls = unet_calls[side]
    itself, to_text = calls[::2], calls[1::2]
    assert [(call.queries, call.keys) for call in itself] == [(n, n) for n in levels(side)]
    assert [(call.queries, call.keys) for call in to_text] == [(n, 77) for n in levels(side)]
    of_level = dict(zip(dict.fromkeys(levels(side)), HEADS, strict=True))
    assert [call.matrices for call in calls] == [of_level[call.queries] for call in calls]


@pytest.mark.parametrize("side", [32, 64])
def test_score_matrices_of_a_u_net_have_the_memory_of_the_formula(unet_calls, side):
    calls = unet_calls[side]
    blocks = [one.bytes + other.bytes for one, other in zip(calls[::2], calls[1::2], strict=True)]
    assert blocks == [scores_bytes(positions, 77) for positions in levels(side)]
    # The paper's U-Net has one block per level on each way; of ours, the first down and the last up of each level.
    assert sum(blocks[i] for i in (0, 2, 4, 6, 9, 12, 15)) == unet_scores_bytes(side**2, 77, depth=3)
    assert sum(blocks) == unet_scores_bytes(side**2, 77, depth=3, blocks=5)
    every_head = sum(call.matrices * call.bytes for call in calls)
    assert every_head == unet_scores_bytes(side**2, 77, depth=3, blocks=5, heads=HEADS)


def test_the_formulas_by_hand():
    assert scores_bytes(4096, 77) == 2 * 4096 * (4096 + 77)
    assert unet_scores_bytes(16, 3, depth=1) == 2 * (2 * 16 * (16 + 3) + 4 * (4 + 3))


def test_memory_grows_with_the_fourth_power_of_the_side(unet_calls):
    small, large = (
        [sum(call.bytes for call in calls[start::2]) for start in (0, 1)] for calls in (unet_calls[32], unet_calls[64])
    )
    assert (large[0], large[1]) == (16 * small[0], 4 * small[1])


def test_the_other_models_have_the_memory_of_one_formula_per_layer():
    for name, formula in operators.formulas().items():
        if "U-Net" not in name:
            calls = operators.recorded(operators.WORKLOADS[name](META))
            assert sum(call.bytes for call in calls) == formula
            assert len({(call.queries, call.keys, call.matrices) for call in calls}) == 1
            assert calls[0].queries == calls[0].keys


def test_a_cached_token_sees_what_its_mask_shows():
    """The text and itself at first, then more of the image until the mask ends: 5 tokens of a row, 4 of a column."""
    layout = TokenLayout(6, 4, 3)
    found = operators.sampled("model.text_positions=6", "model.side=4", "model.kernel=3")
    assert set(found) == {"row", "column", "convolution"}
    for kind, (text, *steps) in found.items():
        assert (text.queries, text.keys, text.seen) == (6, 6, 6)
        mask = dense_mask(visible(kind, layout), layout.length)
        assert [call.seen for call in steps] == mask[6:-1].sum(1).tolist()
        assert {(call.queries, call.matrices) for call in steps} == {(1, 1)}
        assert len({call.keys for call in steps}) == 1 and steps[0].keys == max(call.seen for call in steps)
    assert [call.seen for call in found["row"][1:]] == [6 + min(i + 1, 5) for i in range(15)]
    assert [call.seen for call in found["column"][1:]] == [6 + i // 4 + 1 for i in range(15)]


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", operators.WORKLOADS)
def test_both_ways_compute_the_same(name, float64):
    """Only the order of sums differs. In 64 bits that changes results by at most 2e-12 of their norm; in 32 bits, norms
    over few channels of a small U-Net with random weights let it grow to 1e-4, depending on the CPU."""
    torch.manual_seed(0)
    setting = VariedWeights(SMALL.device, SMALL.small)
    work = operators.WORKLOADS[name](setting)
    found = []
    for way in WAYS:
        calls = []
        with torch.no_grad(), attention_by(way, calls):
            found.append(work().double().clone())
        assert calls
    assert found[0].norm() > 0
    assert (found[1] - found[0]).norm() <= 1e-9 * found[0].norm()
    if name == "DALL-E, cached sampling":
        assert found[0].unique().numel() > 2  # tokens, which depend on the logits


class VariedWeights(operators.Setting):
    """With no weights that are 0 at first and would hide what attention gives."""

    def model(self, *names):
        model = super().model(*names)
        vary(model)
        return model


@pytest.mark.parametrize("name", [name for name in operators.WORKLOADS if "sampling" not in name])
def test_no_attention_escapes(name):
    """Written out, there is a softmax for each recorded call, and none by one call. (Sampling has others, of codes.)"""
    work = operators.WORKLOADS[name](SMALL)
    for way in WAYS:
        calls = []
        with torch.no_grad(), attention_by(way, calls):
            events = profiled(work, SMALL.device).events()
        assert sum(event.name == SPAN for event in events) == len(calls) > 0
        softmaxes = sum(event.name == "aten::softmax" for event in events)
        assert softmaxes == (len(calls) if way == "written out" else 0)


@needs_stub_gpu
def test_every_workload_runs_on_a_gpu(stub_gpu):
    """Networks of convolutions in bfloat16, transformers with a residual stream of float32, and tokens."""
    # Memory that no kernel has written is zero: drawing asks whether logits are finite.
    done = stub_gpu(Path(__file__).with_name("operators_on_stub_gpu.py"), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line.removeprefix("row: ")) for line in done.stdout.splitlines() if line.startswith("row: ")]
    assert [(name, way) for name, way, *_ in rows] == [(name, way) for name in operators.WORKLOADS for way in WAYS]
    dtypes = {
        "U-Net": "bfloat16",
        "VAE": "bfloat16",
        "DALL-E, all": "float32",
        "DALL-E, cached": "int64",
        "GPT": "float32",
    }
    for name, _, dtype, device, calls, launches in rows:
        assert dtype == "torch." + next(value for words, value in dtypes.items() if name.startswith(words))
        assert device == "cuda:0" and launches > calls > 0


def test_attention_is_pytorchs_again_after_the_context():
    plain = F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), attention_by("written out"):
        assert F.scaled_dot_product_attention is not plain
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is plain


@pytest.mark.parametrize("causal", [False, True])
def test_written_out_is_attention(causal):
    """In 64 bits, in which only roundings of 1e-16 differ."""
    q, k, v = torch.randn(3, 2, 3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if causal else torch.eye(5).roll(1, 0).bool()
    exact = naive(q, k, v, mask)
    found = written_out(q, k, v, is_causal=True) if causal else written_out(q, k, v, mask)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, mask), exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(written_out(q, k, v), naive(q, k, v), rtol=1e-12, atol=1e-12)


def test_one_call_for_a_cached_token_is_that_of_two_products():
    """For two captions with three sequences each, in 64 bits."""
    draw = torch.Generator().manual_seed(0)
    q, text, local = (
        torch.randn(shape, dtype=torch.float64, generator=draw)
        for shape in ((2, 4, 3, 1, 8), (2, 2, 4, 5, 8), (2, 2, 4, 3, 6, 8))
    )
    arguments = (q, *text, *local, torch.tensor([False, True, False, True, True, False]))
    found = in_one(F.scaled_dot_product_attention, *arguments)
    torch.testing.assert_close(found, attend_in_two(*arguments), rtol=1e-12, atol=1e-12)


def test_classes_of_operators():
    assert {name: operators.class_of(name) for name in CLASSES} == CLASSES


CLASSES = {
    SPAN: "attention",
    "aten::conv2d": "convolution",
    "aten::linear": "linear",
    "aten::matmul": "linear",
    "aten::addmm": "linear",
    "aten::group_norm": "group norm",
    "aten::layer_norm": "other",
    "aten::softmax": "other",  # the choice of a token
    "aten::upsample_bilinear2d": "other",
    "aten::silu": "other",
}


def test_each_class_has_its_time_on_a_cpu():
    layers = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(2), nn.Linear(64, 64)
    )

    def work():
        x = layers(torch.ones(1, 8, 8, 8))
        return F.scaled_dot_product_attention(x, x, x)

    with torch.no_grad(), attention_by("written out"):
        profiler = profiled(work, torch.device("cpu"))
    found = operators.times_by_class(profiler)
    assert list(found) == list(operators.COLUMNS) and min(found.values()) > 0
    own = sum(event.self_cpu_time_total for event in profiler.key_averages())
    assert sum(found.values()) == pytest.approx(own)


def test_kernels_count_for_the_outermost_operator():
    """A profile as of a GPU. The span of attention is also among the kernels, for as long as they take."""
    kernels = {"gemm": 5.0, "softmax": 7.0, "gemm again": 11.0, "moments": 2.0, "fprop": 30.0, "of Triton": 3.0}

    def operator(name, *children, launches=()):
        durations = kernels | {SPAN: 23.0}
        return SimpleNamespace(
            name=name,
            device_type=DeviceType.CPU,
            cpu_parent=None,
            cpu_children=children,
            kernels=[SimpleNamespace(name=kernel, duration=durations[kernel]) for kernel in launches],
            time_range=SimpleNamespace(start=0, end=999, elapsed_us=lambda: 999),
            cpu_time_total=999,
        )

    def kernel(name, duration):
        times = SimpleNamespace(start=0, end=duration, elapsed_us=lambda: duration)
        return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=times)

    inner = operator("aten::matmul", operator("aten::bmm", launches=["gemm"]))
    softmax = operator("aten::softmax", launches=["softmax"])
    for child in (inner, softmax, *inner.cpu_children):
        child.cpu_parent = "an operator"
    events = [
        operator(SPAN, inner, softmax, launches=[SPAN]),
        inner,
        softmax,
        *inner.cpu_children,
        operator("aten::linear", launches=["gemm again"]),
        operator("aten::group_norm", launches=["moments"]),
        operator("aten::conv2d", launches=["fprop"]),
        *(kernel(name, duration) for name, duration in kernels.items()),
        kernel(SPAN, 23.0),
    ]
    found = operators.times_by_class(SimpleNamespace(events=lambda: events))
    assert found == {"attention": 12, "convolution": 30, "linear": 11, "group norm": 2, "other": 3}
    twice = [*events, operator("aten::linear", launches=["fprop"])]
    with pytest.raises(AssertionError, match="twice"):
        operators.times_by_class(SimpleNamespace(events=lambda: twice))


def test_the_table_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    threads = torch.get_num_threads()
    names = ["U-Net at 256", "DALL-E, cached sampling"]
    operators.main(["--parts", "times", "--size", "small", "--rounds", "1", "--workloads", *names])
    assert torch.get_num_threads() == threads
    (path,) = tmp_path.glob("operators-small-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["workload"], row["attention computed"]) for row in rows] == [(n, way) for n in names for way in WAYS]
    for row in rows:
        shares = [float(row[column].rstrip("%")) for column in operators.COLUMNS]
        assert sum(shares) == pytest.approx(100, abs=0.3) and row["ms"] > 0 and row["profiled ms"] > 0
        with_pictures = row["workload"] == names[0]
        assert shares[0] > 0 and shares[2] > 0 and (shares[1] > 0 and shares[3] > 0) == with_pictures
        assert row["published"] == ""  # of other sizes


def test_the_tables_of_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    small = operators.sampled("model.text_positions=6", "model.side=4")
    monkeypatch.setattr(operators, "sampled", lambda: small)
    operators.main(["--parts", "counts"])
    tables = {path.name.split("-")[0]: json.loads(path.read_text())["rows"] for path in tmp_path.glob("*.json")}
    rows = {row["workload"]: row for row in tables["attention_calls"]}
    assert all(row["MB of scores, one head"] == row["by the formula"] for row in rows.values())
    unet = rows["U-Net at 512"]
    assert unet["queries, x calls"] == "4,096 x4, 1,024 x4, 256 x4, 64 x2, 256 x6, 1,024 x6, 4,096 x6"
    assert (unet["calls"], unet["longest / shortest"]) == (32, 64)
    row = tables["attention_cached"][0]
    assert (row["mask of the layer"], row["tokens after the first"]) == ("row", 15)
    assert (row["keys of each product"], row["seen by the first"], row["seen by the last"]) == ("11", 7, 11)
    assert row["most are first seen by token"] == 5
