"""Measured devices: rates by their definitions, files that plans read, and what is wrong with them in one line."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from recipes.plan import main
from recipes.planning.hardware import calibration
from recipes.planning.hardware.gpus import Device, Shares, device_named, write_device
from tests.recipes.planning.test_plan import SMALL

ROOT = Path(__file__).resolve().parents[4]
RECIPE = ["yamls/sd2_base.yaml", *SMALL, "data.resolution=64"]
SHARES = Shares(compute=1.0, memory=1.0, links=1.0, gap=1e-6)
MINE = Device("a machine", 64e9, 20e9, None, None, SHARES, {"fp32": 1e11, "bf16": 2e11, "fp16": 1e11})


def test_rates_are_work_by_time(monkeypatch):
    done = []
    monkeypatch.setattr(calibration, "median_seconds", lambda kind, work: (work(), done.append(kind), 0.5)[2])
    monkeypatch.setattr(calibration, "COPIED", {"cpu": 1 << 20})
    assert calibration.products("cpu", torch.float32) == 2 * 256**3 / 0.5
    assert calibration.copies("cpu") == 2 * (1 << 20) / 0.5
    assert calibration.operations("cpu") == 0.5 / calibration.OPERATIONS
    assert done == ["cpu"] * 3


def test_products_grow_until_they_take_long_enough(monkeypatch):
    sides = []

    def seconds(kind, work):
        sides.append(len(work()))
        return sides[-1] / 10000  # 0.0512 s for a side of 512

    monkeypatch.setattr(calibration, "median_seconds", seconds)
    assert calibration.products("cpu", torch.float32) == 2 * 512**3 / 0.0512
    assert sides == [256, 512]


def test_this_machine_is_measured_and_planned_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for name, value in {"LARGEST": 256, "ROUNDS": 1, "COPIED": {"cpu": 1 << 22, "cuda": 1 << 22}}.items():
        monkeypatch.setattr(calibration, name, value)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    main(["--calibrate", "mine", "--devices", str(tmp_path)])
    text = capsys.readouterr().out
    assert "links: not measured" in text and f"wrote {tmp_path}/mine.json" in text
    device = device_named("mine", tmp_path)
    rates = [device.memory, device.bandwidth, device.shares.gap, *device.peaks.values()]
    assert all(rate > 0 for rate in rates) and device.peaks.keys() >= {"fp32", "bf16"}
    assert json.loads((tmp_path / "mine.json").read_text())["measured"]["torch"] == torch.__version__
    larger = dataclasses.replace(device, memory=1e12)
    write_device("larger", larger, {}, tmp_path)
    main([*RECIPE, "--gpu", "larger", "--gpus", "1", "--devices", str(tmp_path)])
    assert re.search(r"^1 GPU \(.*, 900.0 GB usable of each\): DDP", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([*RECIPE, "--gpu", "mine", "--gpus", "8"], "--gpu: links within a machine were not measured; calibrate again"),
        ([*RECIPE, "--gpu", "mine", "--gpus", "2", "--machine", "1"], "between machines were not measured; give --bet"),
        ([*RECIPE, "--gpu", "yours", "--gpus", "8"], "--gpu yours: give v100-16, .*, mine, other, slow; or measure"),
        ([*RECIPE, "--gpu", "../mine", "--gpus", "8"], "--gpu ../mine: give v100-16"),
        ([*RECIPE, "--gpu", "broken", "--gpus", "1"], "broken.json: damaged .*delete it and measure again"),
        ([*RECIPE, "--gpu", "slow", "--gpus", "1"], "slow.json: damaged .a rate is not a number above 0."),
        ([*RECIPE, "--gpu", "other", "--gpus", "1"], "other.json: damaged .it has rates of fp32, bf17."),
        ([*RECIPE, "--gpu", "deep", "--gpus", "1"], "deep.json: damaged .nested too deeply."),
        (["--calibrate", "h200"], "--calibrate h200: the table has a device of this name; give another one"),
        (["--calibrate", "a/b"], "--calibrate a/b: give a name of letters, digits"),
        (["--calibrate", "x", "--gpu", "h200"], "--calibrate NAME takes neither a recipe"),
        ([*RECIPE, "--gpus", "8"], "give a recipe, --gpu and --gpus; or --calibrate NAME"),
    ],
)
def test_a_mistake_is_one_line(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    write_device("mine", MINE, {}, tmp_path)
    write_device("slow", dataclasses.replace(MINE, bandwidth=0.0), {}, tmp_path)
    write_device("other", dataclasses.replace(MINE, peaks={"fp32": 1e12, "bf17": 1e13}), {}, tmp_path)
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "broken.json").write_text('{"device": {"name": "x"}}')
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--devices", str(tmp_path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert re.search(line, error.splitlines()[-1])
