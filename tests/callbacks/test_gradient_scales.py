"""The history of scales: bounded, whole after a resume, and with the overflows and skips of a run."""

import json

import pytest
import torch
from PIL import Image

from callbacks import gradient_scales
from callbacks.gradient_scales import GradientScales, History, Row, scale_chart
from recipes.training.callback import Callback
from tests.callbacks.stand_ins import Scaling, Squares
from tests.recipes.training.fake_run import FakeRun, train


def row(batch):
    """An update: block 0 overflows in every third, block 1 in every fourth."""
    nonfinite = {block: batch for block, period in ((0, 3), (1, 4)) if batch % period == 0}
    return Row(batch, 1, int(bool(nonfinite)), [float(batch), 0.0], nonfinite)


@pytest.mark.parametrize("updates", [1, 8, 9, 16, 17, 100, 1000])
def test_a_history_is_bounded_and_loses_no_count(monkeypatch, updates):
    monkeypatch.setattr(gradient_scales, "ROWS", 8)
    history = History()
    for batch in range(1, updates + 1):
        history.add(row(batch))
    rows = history.rows
    assert len(rows) <= 8 and (updates < 5 or len(rows) > 4)
    assert sum(r.updates for r in rows) == updates
    assert all(r.updates == history.stride for r in rows[:-1])
    assert [r.batch for r in rows] == [sum(r.updates for r in rows[: i + 1]) for i in range(len(rows))]
    assert all(r.log2_scales == [float(r.batch), 0.0] for r in rows)  # those after the last update
    batches = range(1, updates + 1)
    for block, period in ((0, 3), (1, 4)):
        assert sum(r.nonfinite.get(block, 0) for r in rows) == sum(b for b in batches if b % period == 0)
    assert sum(r.skipped for r in rows) == sum(b % 3 == 0 or b % 4 == 0 for b in batches)


def run(scaling, callbacks, load=None, start=0):
    """Eight batches, or what a resumed run has left of them."""
    fake = FakeRun(Squares(2), duration="8ba")
    if start:
        fake.at(start)
    train(fake, [{"x": torch.ones(4, 2)}] * 3, callbacks, [scaling], load=load)


def test_a_run_is_drawn(tmp_path):
    scaling = Scaling(bad_batches=(3, 5))
    run(scaling, [GradientScales(str(tmp_path), scaling, every="4ba")])
    record = json.loads((tmp_path / "gradient_scales.json").read_text())
    rows = record["rows"]
    assert [r["batch"] for r in rows] == list(range(1, 9)) and record["stride"] == 1
    assert [r["skipped"] for r in rows] == [int(r["batch"] in (4, 6)) for r in rows]
    assert [r["nonfinite"] for r in rows] == [{"1": 1} if r["batch"] in (4, 6) else {} for r in rows]
    second = [13.001, 13.002, 13.003, 12.503, 12.504, 12.004, 12.005, 12.006]
    assert [r["log2_scales"][1] for r in rows] == pytest.approx(second, abs=1e-4)
    assert [r["log2_scales"][0] for r in rows] == pytest.approx([13 + i / 1000 for i in range(1, 9)], abs=1e-4)
    with Image.open(tmp_path / "gradient_scales.png") as picture:
        assert picture.size == (720, 450)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gradient_scales.json", "gradient_scales.png"]


def test_the_chart_has_each_rows_scales_and_overflows():
    history = History([Row(2, 2, 1, [7.0, 8.0, 9.0], {2: 5}), Row(4, 2, 0, [7.5, 8.5, 9.5], {})], 2)
    top, bottom = scale_chart(history).axes[:2]
    mesh, overflows = bottom.collections
    assert mesh.get_array().reshape(3, 2).tolist() == [[7.0, 7.5], [8.0, 8.5], [9.0, 9.5]]
    assert overflows.get_offsets().tolist() == [[1.0, 2.0]]
    assert top.patches[0].get_data().values.tolist() == [0.5, 0.0]
    assert top.get_title() == "1 of 4 updates skipped"
    _, bottom = scale_chart(History([Row(2, 2, 0, [7.0], {})], 2)).axes[:2]
    assert len(bottom.collections) == 1  # of a run without overflows


def test_a_resumed_run_keeps_its_history(tmp_path):
    scaling = Scaling(bad_batches=(1,))
    whole = GradientScales(str(tmp_path / "whole"), scaling)
    saved = {}

    class Save(Callback):
        def step_end(self, run):
            if run.clock.batch == 4:
                saved.update(whole.state_dict(), skipped=scaling.skipped, exponents=scaling.scales.exponents.clone())

    run(scaling, [whole, Save()])
    scaling = Scaling()
    resumed = GradientScales(str(tmp_path / "resumed"), scaling)

    def load():
        scaling.skipped, scaling.scales.exponents = saved.pop("skipped"), saved.pop("exponents")
        resumed.load_state_dict(saved)

    run(scaling, [resumed], load, start=4)
    files = [tmp_path / name / "gradient_scales.json" for name in ("whole", "resumed")]
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second and len(first["rows"]) == 8 and first["rows"][1]["skipped"] == 1


def test_a_run_without_scales_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient_scales: the run has no resblock_grad_scaling"):
        GradientScales(str(tmp_path), None)
    assert not list(tmp_path.iterdir())
