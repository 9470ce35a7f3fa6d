"""Exports appear whole, keep the old one until then, and are called complete only at the end of a run."""

import json
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from callbacks.export import Export
from data.loading import Loading
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.exports.folder import export
from recipes.models.kl_autoencoder.task import KLAutoencoder
from recipes.models.task import Task
from tests.callbacks.export_ranks import check_exports
from tests.recipes.training.fake_run import FakeRun


class Accident(Task):
    """Writes its version, in two files with an accident between them."""

    version, accident = 1, False

    def export(self, folder):
        assert (folder.parent / "export").exists() == self.had_one  # the old one stays until the new one is whole
        (folder / "first").write_text(str(self.version))
        if self.accident:
            raise OSError("disk full")
        (folder / "second").write_text(str(self.version))


@pytest.fixture
def task():
    task = Accident()
    task.had_one = False
    return task


LOADING = Loading(loader=None)


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_an_accident_leaves_the_old_export(tmp_path, task):
    folder = tmp_path / "export"
    export(task, LOADING, folder, {"batches": 1}, complete=True)
    assert names(tmp_path) == ["done.json", "export", "export.json", "first", "second"]
    task.version, task.accident, task.had_one = 2, True, True
    with pytest.raises(OSError, match="disk full"):
        export(task, LOADING, folder, {"batches": 2}, complete=True)
    assert names(tmp_path) == ["done.json", "export", "export.json", "first", "second"]
    assert (folder / "first").read_text() == "1" and json.loads((folder / "export.json").read_text()) == {"batches": 1}
    task.accident = False
    export(task, LOADING, folder, {"batches": 2}, complete=False)
    assert names(tmp_path) == ["export", "export.json", "first", "second"]  # no longer called complete
    assert (folder / "second").read_text() == "2"


def test_a_first_export_that_fails_leaves_nothing(tmp_path, task):
    task.accident = True
    with pytest.raises(OSError, match="disk full"):
        export(task, LOADING, tmp_path / "export", {}, complete=True)
    assert names(tmp_path) == []


def test_done_is_said_at_the_end_and_once(tmp_path, task, capsys):
    written = []

    def write(folder):
        written.append(run.clock.batch)
        task.had_one = True

    task.export = write
    callback = Export(task, "run", str(tmp_path), LOADING, None, None, "first", every="2ba")
    run = FakeRun(task, duration="4ba")
    for batch in range(1, 5):
        callback.after_save(run.at(batch, samples=3))
        assert (tmp_path / "export").exists() == (batch >= 2)
        assert not (tmp_path / "export" / "done.json").exists()
    callback.after_save(run)
    assert written == [2]
    callback.end(run)
    assert written == [2, 4]
    record = {"run_name": "run", "batches": 4, "samples": 12, "started_from": "first"}
    assert json.loads((tmp_path / "export" / "done.json").read_text()) == record
    assert callback.is_complete(run.clock) and not callback.is_complete(run.at(3, samples=3).clock)  # of another run
    assert capsys.readouterr().out == f"weights: {tmp_path}/export\n"


def test_weights_that_are_not_finite_leave_the_old_export(tmp_path, task, capsys):
    task.had_one, task.weight = False, torch.nn.Parameter(torch.ones(2))
    callback = Export(task, "run", str(tmp_path), LOADING, None, None, None, every="2ba")
    run = FakeRun(task, duration="6ba")
    callback.after_save(run.at(2))
    task.weight.data[1], task.had_one, task.version = torch.inf, True, 2
    callback.after_save(run.at(4))
    assert f"export: batch 4 is not finite; {tmp_path}/export is left as it is" in capsys.readouterr().out
    with pytest.raises(ValueError, match="export: weights are not finite at the end of the run"):
        callback.end(run.at(6))
    assert (tmp_path / "export" / "first").read_text() == "1" and not (tmp_path / "export" / "done.json").exists()


class Average:
    """A stand-in of ScheduledEMA: averaged weights are 7."""

    decay, every, begun = 0.99, 5, 3

    def __init__(self, task, running):
        self.task, self.running = task, running

    @contextmanager
    def applied(self):
        if not self.running:
            yield False
            return
        weight, self.task.weight = self.task.weight, 7
        yield True
        self.task.weight = weight


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_averaged_weights_are_exported_once_there_are_any(tmp_path, beside, running):
    class Weight(Task):
        weight = 1
        exports_average_beside = beside

        def export(self, folder):
            (folder / "weight").write_text(str(self.weight))

        def export_average(self, folder):
            (folder / "weight_ema").write_text(str(self.weight))

    task = Weight()
    callback = Export(task, "run", str(tmp_path), LOADING, None, Average(task, running), None)
    callback.end(FakeRun(task).at(10))
    written = {path.name: path.read_text() for path in (tmp_path / "export").glob("weight*")}
    if not running:
        assert written == {"weight": "1"}
    else:
        assert written == ({"weight": "1", "weight_ema": "7"} if beside else {"weight": "7"})
    record = json.loads((tmp_path / "export" / "export.json").read_text())
    assert record.get("average") == ({"decay": 0.99, "every": 5, "begun": 3} if running else None)
    assert task.weight == 1


def test_the_scaling_factor_of_averaged_weights_is_theirs(tmp_path, capsys):
    """It was that of the weights of training, whose latents may be several times as large."""
    task = KLAutoencoder(channels=[8, 8], blocks=1, norm_groups=4).train()
    images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        task({"image": images})
    moments, head = task.latent_moments.clone(), task.network.quant_conv
    ema = ScheduledEMA(decay=0.5)
    run = FakeRun(task, duration="10ba").at(2)
    run.batch = {"image": images[:2]}
    for hook in ("change_modules", "begin"):
        getattr(ema, hook)(run)
    with torch.no_grad():  # what is averaged has a third of the deviation
        for parameter in head.parameters():
            parameter[:4] /= 3
        head.bias[4:] -= 2 * math.log(3)
    ema.average.update(0.0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter[:4] *= 3
        head.bias[4:] += 2 * math.log(3)
    Export(task, "run", str(tmp_path), LOADING, None, ema, None).end(run.at(10))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    mean, square = moments.tolist()
    assert config["scaling_factor"] == pytest.approx(3 * (square - mean**2) ** -0.5, rel=0.05)
    assert torch.equal(task.latent_moments, moments) and task.training
    run.batch = {}  # of a start that finds the run at its end
    Export(task, "run", str(tmp_path), Loading(loader=[{"image": images[:2]}]), None, ema, None).end(run)
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == config
    Export(task, "run", str(tmp_path), Loading(loader=[]), None, ema, None).end(run)
    assert "make training.duration a batch longer, and start again" in capsys.readouterr().out


def test_of_encoders_an_export_has_no_other_weights(tmp_path, task):
    """Repositories of the hub have the same weights in several formats, and pickles among them."""
    clip = ["open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json"]
    vae = ["config.json", "diffusion_pytorch_model.safetensors"]
    others = ["model.safetensors", "open_clip_pytorch_model.bin", "diffusion_pytorch_model.fp16.safetensors", "x.ckpt"]
    for folder, files in ((tmp_path / "clip", clip), (tmp_path / "pipeline" / "vae", vae)):
        (folder / ".git").mkdir(parents=True)
        for file in (*files, *others, ".git/objects"):
            (folder / file).write_text("{}")
    parts = {
        "image_encoder": {"name": "kl_vae", "path": str(tmp_path / "pipeline"), "subfolder": "vae"},
        "text_encoder": {"name": "open_clip_text", "path": str(tmp_path / "clip")},
    }
    records = {name: {"component": component} for name, component in parts.items()}
    manifest = SimpleNamespace(**records, write=lambda folder: None)
    export(task, Loading(loader=None, manifest=manifest, resolution=32), tmp_path / "export", {}, complete=True)
    assert names(tmp_path / "export" / "text_encoder") == clip
    assert names(tmp_path / "export" / "image_encoder") == [*vae, "vae"]
    plan = SimpleNamespace(parameters=1, averaged=False, manifest=manifest, output="runs/x", shards=1)
    assert Export.cost({"every": None}, plan).files.held == 4 + 2 * (len(clip) + len(vae))


def test_what_an_export_takes(task):
    """On the disk, the next export is whole before the last one goes; in memory, an average is gathered, too."""

    def cost(every, averaged, beside, shards=1):
        task.exports_average_beside = beside
        plan = {"parameters": 10**9, "averaged": averaged, "output": "x", "shards": shards, "task": task}
        return Export.cost({"every": every}, SimpleNamespace(**plan, manifest=None))

    held = [cost(every, *kinds).files.held for every in (None, "5ba") for kinds in ((False, True), (True, False))]
    assert held == [4e9, 4e9, 8e9, 8e9]
    assert cost(None, True, True).files.held == 8e9 and cost(None, True, True).lines == ()
    assert [cost(None, averaged, True, shards=2).lines[0][:6] for averaged in (False, True)] == ["4.0 GB", "8.0 GB"]


def test_a_divided_model_is_written_tensor_by_tensor_on_one_rank(tmp_path, one_rank):
    check_exports(tmp_path)
