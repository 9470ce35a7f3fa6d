"""The benchmark of gradient scales at a tiny size, and its components."""

import json

import pytest
import torch
from PIL import Image

from benchmarks import grad_scaling
from benchmarks.common import reporting
from benchmarks.common.scalings import GlobalScales, GlobalScaling, StartedScaling, WideGradients, WideProducts
from benchmarks.grad_scaling import EACH, FULL, ONE
from callbacks import exponents
from callbacks.charts import write_chart
from recipes.algorithms.sixteen_bit.block_scaling import scale_branch, unscale
from tests.recipes.algorithms.residual import Residual, loss_of
from tests.recipes.training.fake_run import FakeRun


def test_three_kinds_train(token_sets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    # A chart takes a second: of each run only the last one is drawn.
    def last(chart, path):
        return write_chart(chart, path) if path.stem.endswith("3") else path.touch()

    monkeypatch.setattr(exponents, "write_chart", last)
    small = "model={text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}"
    rows = grad_scaling.main(
        ["--tokens", str(token_sets), "--vocabulary", str(token_sets / "vocabulary.json"), "--layers", "2",
         "--width", "16", "--batches", "4", "--batch", "4", "--spans", "0", "40", "--charts", str(tmp_path / "charts"),
         small, "data={resolution: 32, positions: 16}", "evals.val={resolution: 32, positions: 16, workers: 0}"]
    )  # fmt: skip
    assert [row["training"] for row in rows] == 2 * [FULL, ONE, EACH]
    assert [row["gradients decrease by"] for row in rows] == 3 * ["as they are"] + 3 * ["2^40"]
    zero = [row["in the last block, %"] for row in rows]
    # In two of the three batches that are counted the unembedding is still zero, and so is what comes from it.
    assert zero[0] == zero[3] == pytest.approx(200 / 3, abs=0.01) and zero[4] > zero[3] + 10
    assert rows[0]["difference to 32 bits"] == rows[3]["difference to 32 bits"] == 0
    losses = ("training loss, last fifth", "validation loss")
    assert all(rows[0][name] == rows[3][name] for name in losses)  # in 32 bits the decrease changes nothing
    charts = {file.name for file in (tmp_path / "charts").iterdir()}
    assert charts == {"exponents.png", "grad_scaling.png", "gradient_scales.png"}
    sizes = {name: Image.open(tmp_path / "charts" / name).size for name in charts}
    assert sizes["grad_scaling.png"] == (810, 540) and min(min(size) for size in sizes.values()) > 100
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json"))
    assert record["rows"] == rows
    assert "fp16, one scale per block" in capsys.readouterr().out


def test_without_tokens_it_says_what_to_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        grad_scaling.main(["--tokens", str(tmp_path / "none")])
    assert "run make quickstart-tokens" in capsys.readouterr().err


def test_one_scale_follows_the_rule_of_torch(monkeypatch):
    """Against torch's own update, the interval set to 3."""
    monkeypatch.setattr(GlobalScales, "interval", 3)
    outcomes = [True, True, True, True, False, True, True, True, True, False, False, True]
    scales = GlobalScales(torch.full((2,), 16.0, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    scale, growth = torch.tensor(2.0**16), torch.zeros((), dtype=torch.int32)
    for finite in outcomes:
        scales = scales.after(torch.tensor([True, finite]))
        torch._amp_update_scale_(scale, growth, torch.tensor(0.0 if finite else 1.0), 2.0, 0.5, 3)
        assert scales.values().tolist() == [scale.item()] * 2


def gradients(task, scale, loss_scale=1.0):
    """The gradients of all blocks, computed in fp16 with one scale, and unscaled."""
    tensor = torch.tensor(scale)
    for layer in task.layers:
        scale_branch(layer.branch, tensor, torch.zeros((), dtype=torch.int64))
    (loss_of(task, 0) * loss_scale).backward()
    found = [[p.grad for p in layer.parameters()] for layer in task.layers]
    assert all(unscale(block, tensor * loss_scale) for block in found)
    return [g for block in found for g in block]


def test_a_scale_of_all_blocks_equals_a_scale_of_the_loss():
    inside, outside = gradients(Residual(), 2.0**12), gradients(Residual(), 1.0, 2.0**12)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(inside, gradients(Residual(), 1.0), strict=True))


def test_wide_gradients_change_nothing_but_their_size():
    plain, wide = Residual(), Residual()
    widen = WideGradients(wide, span=20.0)
    widen.change_modules(FakeRun(wide))
    losses = [loss_of(task, 0) for task in (plain, wide)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for number, factor in enumerate((1.0, 2.0**-20)):
        pairs = zip(plain.layers[number].parameters(), wide.layers[number].parameters(), strict=True)
        assert all(torch.equal(p.grad * factor, w.grad) for p, w in pairs)
    widen.average_gradients(FakeRun(wide))
    pairs = zip(plain.parameters(), wide.parameters(), strict=True)
    assert all(torch.equal(p.grad, w.grad) for p, w in pairs)  # powers of two are exact
    assert list(plain.state_dict()) == list(wide.state_dict())


def test_products_are_summed_in_32_bits():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 500, generator=generator).half() for _ in range(2))
    bias = torch.randn(8, generator=generator).half()
    with WideProducts():
        product, added = a @ b.T, torch.nn.functional.linear(a, b, bias)
        wide = a.float() @ b.float().T
    assert product.dtype == torch.float16 and torch.equal(product, wide.half())
    assert torch.equal(added, torch.addmm(bias.float(), a.float(), b.float().T).half())
    overflow = torch.full((2, 2), 300.0).half()
    with WideProducts():
        assert torch.isinf(overflow @ overflow).all()


def test_scales_start_where_they_are_told():
    scaling = StartedScaling(Residual(), starts=[30.0, 45.5])
    assert scaling.scales.exponents.tolist() == [30.0, 45.5]
    assert GlobalScaling(Residual(), start=20.0).scales.after(torch.tensor([True, False])).exponents.tolist() == [
        19,
        19,
    ]
    assert scaling.scales.after(torch.tensor([True, False])).exponents.tolist() == pytest.approx([30.001, 45.0])
