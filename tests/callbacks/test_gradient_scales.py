"""The history of scales: bounded, whole after a resume, and with the overflows and skips of a run."""

import json

import pytest
from PIL import Image

from callbacks import gradient_scales
from callbacks.gradient_scales import GradientScales, History, Row, scale_chart
from tests.recipes.algorithms.sixteen_bit.test_resblock_grad_scaling import run


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


def test_a_run_is_drawn(tmp_path):
    trainer = run({}, bad_batches=(3, 5), callbacks=[GradientScales(str(tmp_path), every="4ba")])
    record = json.loads((tmp_path / "gradient_scales.json").read_text())
    rows = record["rows"]
    assert [r["batch"] for r in rows] == list(range(1, 9)) and record["stride"] == 1
    assert [r["skipped"] for r in rows] == [int(r["batch"] in (4, 6)) for r in rows]
    # One NaN in each of two batches, of the second block.
    assert [r["nonfinite"] for r in rows] == [{"1": 1} if r["batch"] in (4, 6) else {} for r in rows]
    # Up in every update without an overflow, down at the first; the second comes within 125 updates.
    second = [13.001, 13.002, 13.003, 12.503, 12.504, 12.504, 12.505, 12.506]
    assert [r["log2_scales"][1] for r in rows] == pytest.approx(second, abs=1e-4)
    assert [r["log2_scales"][0] for r in rows] == pytest.approx([13 + i / 1000 for i in range(1, 9)], abs=1e-4)
    with Image.open(tmp_path / "gradient_scales.png") as picture:
        assert picture.size == (720, 450)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gradient_scales.json", "gradient_scales.png"]
    assert trainer.state.timestamp.batch == 8


def test_the_chart_has_each_rows_scales_and_overflows():
    history = History([Row(2, 2, 1, [7.0, 8.0, 9.0], {2: 5}), Row(4, 2, 0, [7.5, 8.5, 9.5], {})], 2)
    top, bottom = scale_chart(history).axes[:2]
    mesh, overflows = bottom.collections
    assert mesh.get_array().reshape(3, 2).tolist() == [[7.0, 7.5], [8.0, 8.5], [9.0, 9.5]]
    assert overflows.get_offsets().tolist() == [[1.0, 2.0]]
    assert top.patches[0].get_data().values.tolist() == [0.5, 0.0]
    assert top.get_title() == "1 of 4 updates skipped"


def test_a_resumed_run_keeps_its_history(tmp_path):
    whole, saves = tmp_path / "whole", tmp_path / "saves"
    run({}, bad_batches=(1,), callbacks=[GradientScales(str(whole))], save_folder=str(saves), save_interval="4ba")
    saved = str(next(saves.glob("*-ba4-rank0.pt")))
    run({}, callbacks=[GradientScales(str(tmp_path / "resumed"))], load_path=saved)
    first, second = (json.loads((f / "gradient_scales.json").read_text()) for f in (whole, tmp_path / "resumed"))
    assert first == second and len(first["rows"]) == 8 and first["rows"][1]["skipped"] == 1


def test_a_run_without_scales_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient_scales: the run has no resblock_grad_scaling"):
        run(None, callbacks=[GradientScales(str(tmp_path))])
    assert not list(tmp_path.iterdir())
