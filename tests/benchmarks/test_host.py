"""The real U-Net on a GPU that computes nothing: launches, waits and memory of a step."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu_run.subjects import SUBJECTS, recipe_for
from benchmarks.host import MARK, SETTINGS, row
from recipes.planning.divided_run import Cluster
from recipes.planning.hardware.gpus import DEVICES
from recipes.planning.plan import Planner
from tests.stub_gpu import needs_stub_gpu

ROOT = Path(__file__).resolve().parents[2]
NAME = "sd2_base, microbatches of 128"


def measured(stub_gpu, name):
    assert name in SETTINGS
    done = stub_gpu(Path(__file__).with_name("host_on_stub_gpu.py"), "--row", name)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.split(MARK)[1])


@needs_stub_gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_launches_waits_and_memory_of_a_step_at_its_real_size(stub_gpu):
    found = measured(stub_gpu, NAME)
    # Two microbatches. Another version of a library may launch a few more.
    assert 5000 < found["launches per step"] < 7200
    # The measurement's own, and Composer's: the size of the batch, the loss, times, whether the epoch is over.
    assert found["waits per step"] <= 5
    # A plan must not be too low; that much above, it still says what fits.
    assert found["peak GB"] <= found["peak GB by the planner"] <= 1.02 * found["peak GB"]


@needs_stub_gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_lightning_the_host_never_waits(stub_gpu):
    """But once, where the measurement itself does."""
    found = measured(stub_gpu, "sd2_base, 16 images, Lightning")
    assert found["waits per step"] == 1
    assert found["rate"] > 0  # steps are counted here, because samples are on the device


def test_a_row_has_the_median_of_its_processes():
    rates = (100.0, 90.0, 450.0)
    values = row([{"recipe": "sd2_base, 16 images", "rate": rate, "waits per step": 7} for rate in rates])
    assert (values["host's rate"], values["lowest to highest"]) == ("100 images/s", "90 to 450")
    assert (values["host / goal"], values["waits per step"], "rate" in values) == (0.1, 7, False)


def test_the_planner_has_the_time_for_launches_that_was_measured(tmp_path):
    """The host's speed differs between engines, and by a factor of two between days, but what graphs save does not."""
    table = (ROOT / "benchmarks" / "results" / "host-sd2-cpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (sd2_base, 16 images[^|]*) \| ([\d,]+) images/s ", table, re.MULTILINE)
    assert len(rows) == 5
    planner, device = None, DEVICES["h100"]
    seconds = {}
    for name, rate in rows:
        key, changes = SETTINGS[name]
        recipe = recipe_for(SUBJECTS[key], changes, False, tmp_path)
        planner = planner or Planner(recipe)
        planner.recipe, planner._passes = recipe, {1: None}  # of the same model; its memory is not asked for
        run = next(run for run in planner.runs(Cluster(device, 1e15, device.shares, 1, 1)) if run.division == "DDP")
        seconds[name] = run.time(16, recompute=False).host, 16 / int(rate.replace(",", ""))
    for name, (plan, measured) in seconds.items():
        without = re.sub(r", CUDA graphs( of torch.compile)?", "", name)
        assert plan / seconds[without][0] == pytest.approx(measured / seconds[without][1], rel=0.25), name
        assert 0.4 < plan / measured < 1.25, name
