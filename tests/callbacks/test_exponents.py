"""Histograms of exponents: counts against numpy's frexp, runs against gradients that are computed once more, charts."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from callbacks import exponents
from callbacks.charts import write_chart
from callbacks.exponent_counts import COLUMNS, LEAST, NONFINITE, ZERO, Histograms, count_exponents
from callbacks.exponents import Exponents, exponent_chart
from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.models.task import Task
from tests.callbacks.exponent_reference import counts_of, naive, run
from tests.recipes.algorithms.residual import WordTask
from tests.recipes.training.fake_run import FakeRun, train

SUBNORMALS = [2.0**-149, -3 * 2.0**-149, 2.0**-127, 2.0**-126 - 2.0**-149]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0 - 2.0**-23, 2.0**127, 3.4e38, 2.0**-126]


def test_counts_are_those_of_numpy():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5000, generator=generator) * torch.exp2(torch.rand(5000, generator=generator) * 240 - 130)
    values = torch.cat([torch.tensor(SPECIAL + SUBNORMALS), wide]).view(5, -1)
    counts = count_exponents(values)
    assert counts.tolist() == naive([values.numpy()])
    assert counts.sum() == values.numel() and counts[ZERO] == 2 and counts[NONFINITE] == 3
    assert [counts[e - LEAST + 1].item() > 0 for e in (-149, -148, -127, 127)] == [True] * 4
    for dtype in (torch.float16, torch.bfloat16):
        assert count_exponents(values.to(dtype)).tolist() == naive([values.to(dtype).float().numpy()])
    assert count_exponents(torch.empty(0)).tolist() == [0] * COLUMNS


def test_shares_by_hand():
    counts = torch.zeros(2, COLUMNS, dtype=torch.int64)

    def put(block, exponent, count):
        counts[block, exponent - LEAST + 1] = count

    counts[0, ZERO], counts[1, NONFINITE] = 10, 20
    # Scale 2^10: fp16 begins at 2^-34, and ends below 2^6. 1-6-9 begins at 2^-68, and ends below 2^4.
    put(0, -35, 1), put(0, -34, 2), put(0, 5, 4), put(0, 6, 8), put(0, -68, 16), put(0, -69, 32), put(0, 3, 64)
    # Scale 2^10.5: exponents -35 and 5 are divided, and count as inside.
    put(1, -35, 100), put(1, -36, 200), put(1, 5, 300), put(1, 6, 400)
    found = Histograms(["a", "b"], counts, [10.0, 10.5]).shares()
    total = counts.sum().item()
    assert found == {
        "zero": 10 / total,
        "nonfinite": 20 / total,
        "below_fp16": (1 + 16 + 32 + 200) / total,
        "above_fp16": (8 + 400) / total,
        "outside_1_6_9": (32 + 4 + 8 + 300 + 400) / total,
    }


@pytest.mark.parametrize("scale", [None, 11.3])
def test_a_run_counts_whole_gradients_without_scale_and_unclipped(tmp_path, scale):
    """The scale is no power of two: gradients must be divided by it, not their exponents shifted."""

    def levers(task):
        return [ClipByNorm(1e-3), *([] if scale is None else [ResblockGradScaling(task, start=scale)])]

    reference, fake = run(tmp_path, levers)
    files = sorted((tmp_path / "exponents").glob("*.json"))
    assert [file.name for file in files] == ["ba0000002.json", "ba0000004.json"]
    for file, batch in zip(files, (2, 4), strict=True):
        record = json.loads(file.read_text())
        assert record["batches"] == batch and record["scaled"] == (scale is not None)
        assert [block["block"] for block in record["blocks"]] == ["layers.0", "layers.1"]
        assert [block["elements"] for block in record["blocks"]] == [2 * 16 * 32] * 2  # matrices alone
        assert counts_of(record) == reference.counts[batch]
        log2_scale = 13.0 if scale is None else scale + batch / 1000
        assert [block["log2_scale"] for block in record["blocks"]] == pytest.approx([log2_scale] * 2, abs=1e-4)
        for name, share in record["shares"].items():
            assert fake.values(f"exponents/{name}")[batch] == share
        with Image.open(file.with_suffix(".png")) as picture:
            assert picture.size == (720, 540)
    assert reference.counts[2] != reference.counts[3]  # a neighbour's would be noticed
    assert len(list((tmp_path / "exponents").iterdir())) == 4


def test_what_is_not_finite_is_counted_though_the_update_is_skipped(tmp_path):
    run(tmp_path, lambda task: [ResblockGradScaling(task)], bad_batch=2)
    record = json.loads((tmp_path / "exponents" / "ba0000002.json").read_text())
    assert [block["nonfinite"] > 0 for block in record["blocks"]] == [False, True]
    assert record["shares"]["nonfinite"] > 0


def test_a_model_without_blocks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="exponents: Task does not say which of its modules are blocks"):
        Exponents(Task(), str(tmp_path))


# --- charts ----------------------------------------------------------------------------------------------------------


def test_the_chart_shows_the_windows_of_each_scale():
    counts = torch.zeros(3, COLUMNS, dtype=torch.int64)
    counts[:, 10 - LEAST + 1] = 1
    counts[1] = 0  # a block without matrices
    figure = exponent_chart(Histograms(["a", "b", "c"], counts, [7.0, 13.5, 24.0]), 5, scaled=True)
    windows = {patch.get_label(): patch.get_data().values for patch in figure.axes[0].patches}
    scales = np.array([7.0, 13.5, 24.0])
    assert windows.keys() == {f"fp16 / scale, {name}" for name in ("largest", "least normal", "least")}
    np.testing.assert_allclose(windows["fp16 / scale, largest"], np.log2(65504) - scales)
    np.testing.assert_allclose(windows["fp16 / scale, least normal"], -14 - scales)
    np.testing.assert_allclose(windows["fp16 / scale, least"], -24 - scales)
    narrow = sorted(line.get_ydata()[0] for line in figure.axes[0].lines)
    assert narrow == [-68.0, math.log2(16 - 2**-6)]
    low, high = figure.axes[0].get_ylim()
    assert low < -68 and high > 11  # all that was counted, and both ranges
    counts[2, -100 - LEAST + 1] = 1
    assert exponent_chart(Histograms(["a", "b", "c"], counts, [7.0] * 3), 5, scaled=True).axes[0].get_ylim()[0] < -100


def test_a_chart_is_written_atomically(tmp_path):
    figure = exponent_chart(Histograms(["a"], torch.ones(1, COLUMNS, dtype=torch.int64), [13.0]), 0, scaled=False)
    path = tmp_path / "deep" / "chart.png"
    write_chart(figure, path)
    whole = path.read_bytes()

    def fail(partial, format):
        partial.write_bytes(b"half")
        raise OSError("disk full")

    broken = SimpleNamespace(savefig=fail)
    with pytest.raises(OSError, match="disk full"):
        write_chart(broken, path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("stop", [2, 3, 4, 5])
def test_a_resumed_run_counts_the_batches_that_the_first_one_would_have(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(exponents, "write_chart", lambda chart, path: None)  # which takes most of a second

    def counted(duration, state=None, batch=0):
        """(batches at which it logged, state) of a run that begins after so many batches."""
        task = WordTask()
        callback = Exponents(task, str(tmp_path / str(duration)), every="2ba")
        fake = FakeRun(task, duration=f"{duration}ba")

        def load():
            callback.load_state_dict(state)
            fake.clock = replace(fake.clock, batch=batch, sample=3 * batch)

        data = [{"words": torch.arange(12).view(3, 4) % 11}] * 100
        train(fake, data, [callback], load=None if state is None else load)
        return [batch for batch, _ in fake.logged], callback.state_dict()

    whole, _ = counted(8)
    assert whole == [2, 4, 6]
    before, state = counted(stop)
    after, _ = counted(8, state, stop)
    assert before + after == whole
