"""Recipes train for real: Stable Diffusion 2's, at a small width, on shards that the encode job wrote."""

import json
import shutil
import sys
import warnings
from contextlib import nullcontext
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer import Callback
from PIL import Image
from streaming import LocalDataset, MDSWriter
from torch.torch_version import TorchVersion

from data.encoded.manifest import NAME, NULL_TEXT
from recipes.comparison.runs import read_runs
from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.engines import parts
from recipes.engines.composer import trainer as composer_trainer
from recipes.engines.composer.adapters import check_trained
from recipes.engines.composer.run import clock_of
from recipes.engines.composer.trainer import build_trainer
from tests.ranks import launch

ROOT = Path(__file__).resolve().parents[4]


class Losses(Callback):
    def __init__(self):
        self.values = []

    def batch_end(self, state, logger):
        self.values.append(state.total_loss_dict["loss/train/total"])


def losses_of(recipe):
    """The training loss of every batch."""
    trainer = build_trainer(recipe)
    losses = Losses()
    trainer.state.callbacks.append(losses)
    trainer.fit()
    trainer.close()
    return losses.values


def parameters(trainer):
    return [p.detach() for p in trainer.state.model.parameters()]


def difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(parameters(one), parameters(other), strict=True))


# --- a finished run --------------------------------------------------------------------------------------------------


def test_what_a_run_writes(exported):
    recipe, trainer = exported
    output = Path(recipe.output)
    assert {path.name for path in output.iterdir()} == {
        "checkpoints", "config.yaml", "encoded.json", "export", "records", "samples", "tensorboard",
    }  # fmt: skip
    checkpoints = {path.name for path in (output / "checkpoints").iterdir() if not path.is_symlink()}
    assert checkpoints == {"ep1-ba6-rank0.pt", "ep2-ba12-rank0.pt", "ep2-ba14-rank0.pt"}
    assert trainer.state.timestamp.batch == 14 and trainer.state.timestamp.sample == 14 * 8
    done = json.loads((output / "export" / "done.json").read_text())
    record = {"run_name": "sd2_base", "batches": 14, "samples": 112, "resolution": 16, "images": 40}
    assert done == record | trainer.state.model.task.export_record()
    assert not [path for path in output.rglob("*") if ".tmp" in path.name]


def test_the_resolved_config_is_saved_and_loads_back(exported):
    recipe, _ = exported
    text = Path(recipe.output, "config.yaml").read_text()
    assert text == to_yaml(recipe)
    assert load_config(Path(recipe.output, "config.yaml"), [], Recipe) == recipe


def test_validation_figures(exported):
    _, trainer = exported
    figures = {name: float(value) for name, value in trainer.state.eval_metric_values.items()}
    assert set(figures) == {"loss", "loss_t50", "loss_t500", "loss_t950"}
    assert figures["loss"] == pytest.approx(np.mean([figures[f"loss_t{t}"] for t in (50, 500, 950)]), rel=1e-5)
    assert 0.05 < figures["loss"] < 0.9  # a new network predicts nothing: 1


def test_sample_grids(exported):
    recipe, _ = exported
    samples = sorted(Path(recipe.output, "samples").iterdir())
    assert [path.name for path in samples] == ["ba0000006.png", "ba0000012.png", "ba0000014.png"]
    grids = [np.asarray(Image.open(path)) for path in samples]
    assert grids[0].shape == (2 * (128 + 19 + 6) + 6, 2 * (128 + 6) + 6, 3)  # three pictures of 16, enlarged to 128
    assert (grids[0] != grids[2]).any()


def test_figures_and_pictures_are_logged(exported):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe, _ = exported
    scalars, images = {}, {}
    for folder in {path.parent for path in Path(recipe.output, "tensorboard").rglob("events*")}:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
        scalars |= {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        images |= {tag: [e.step for e in events.Images(tag)] for tag in events.Tags()["images"]}
    assert scalars["loss/train/total"] == list(range(14))
    assert len(scalars["metrics/val/loss"]) == 3  # batches 5, 10 and the end
    pictures = [steps for tag, steps in images.items() if tag.startswith("samples")]
    assert sorted(step for steps in pictures for step in steps) == [6, 12, 14]


def test_a_run_is_read_for_a_comparison(exported):
    recipe, _ = exported
    (run,) = read_runs([Path(recipe.output)], 12, 64)
    assert run.curves["loss/train/total"].batches.tolist() == list(range(14)) and run.config == recipe
    assert run.position(14, "samples") == 112 and 0 < run.position(14, "hours") < 1
    assert {prompt: [p.batch for p in found] for prompt, found in run.pictures.items()} == {
        prompt: [6, 12, 14] for prompt in ("a dot", "a star", "a wall")
    }


def test_only_weights_can_be_taken(exported, small_recipe, tmp_path):
    recipe, trainer = exported
    started = build_trainer(small_recipe(tmp_path, f"checkpoints.load_weights={recipe.output}/export"))
    assert difference(started, trainer) == 0 and started.state.timestamp.batch == 0
    assert not started.state.optimizers[0].state
    started.close()


# --- learning --------------------------------------------------------------------------------------------------------


def test_it_learns_and_every_set_is_validated(small_recipe, latent_sets, tmp_path, capsys):
    seen = f"{{name: latents, streams: {{s: {{name: local, path: {latent_sets}/train}}}}, resolution: 16, workers: 0}}"
    changes = ["training.duration=60ba", "training.eval_every=30ba", "checkpoints.save=false", f"evals.seen={seen}"]
    trainer = build_trainer(small_recipe(tmp_path, *changes, "model.objective.prediction=v_prediction"))
    trainer.eval()
    before = {label: float(metrics["loss"].compute()) for label, metrics in trainer.state.eval_metrics.items()}
    capsys.readouterr()
    trainer.fit()
    trainer.close()
    after = {label: float(metrics["loss"].compute()) for label, metrics in trainer.state.eval_metrics.items()}
    assert set(before) == {"val", "seen"}
    assert after["seen"] < 0.6 * before["seen"] and after["val"] < 0.6 * before["val"]
    lines = capsys.readouterr().out.splitlines()
    for batch in (30, 60):
        for label in ("val", "seen"):
            assert sum(f"{label} at batch {batch}: loss " in line for line in lines) == 1


def test_seeds(quick_recipe, tmp_path):
    def run(name, seed, *changes):
        short = [f"seed={seed}", "training.duration=6ba", "checkpoints.save=false"]
        return losses_of(quick_recipe(tmp_path / name, *short, *changes))

    one, other = run("one", 1), run("other", 2)
    assert all(a != b for a, b in zip(one, other, strict=True))
    # Neither validation nor sampling nor counting FLOPs draws a number that training draws.
    watched = run(
        "watched", 1, "training.eval_every=2ba", "callbacks.throughput.window=2", "evals.val.workers=1",
        "callbacks.sample_grid={name: sample_grid, every: 2ba, prompts: [a dot], steps: 2}",
        "callbacks.export={name: export, every: 2ba}",
    )  # fmt: skip
    alone = run("alone", 1, "evals.val=null", "callbacks.throughput=null", "data.workers=1")
    assert one == watched == alone


def test_microbatches_add_up(quick_recipe, tmp_path):
    """Gradients of 8 at once and of 4 + 4 are the same but for the noise, which is drawn in another order."""
    whole = losses_of(quick_recipe(tmp_path / "8", "training.duration=8ba", "checkpoints.save=false"))
    parts = losses_of(
        quick_recipe(tmp_path / "4", "training.duration=8ba", "training.microbatch=4", "checkpoints.save=false")
    )
    assert whole != parts and abs(np.mean(whole) - np.mean(parts)) < 0.15


class Signs(torch.optim.Optimizer):
    """An optimizer whose step does not call the closure that it may be given."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


def test_an_optimizer_that_calls_no_closure_trains(quick_recipe, tmp_path):
    trainer = build_trainer(
        quick_recipe(tmp_path, "training.duration=2ba", "schedule.warmup=0ba", "checkpoints.save=false"),
        lambda parts: setattr(parts, "new_optimizer", Signs),
    )
    before = [parameter.clone() for parameter in parameters(trainer)]
    losses = Losses()
    trainer.state.callbacks.append(losses)
    trainer.fit()
    trainer.close()
    assert all(loss > 0 for loss in losses.values) and len(losses.values) == 2
    changes = [(a - b).abs().max().item() for a, b in zip(before, parameters(trainer), strict=True)]
    assert max(changes) == pytest.approx(2e-3, rel=0.01)


def test_trained_parameters_that_the_optimizer_lacks_are_refused():
    """A lever that replaced a module ended a run with a KeyError at its first checkpoint."""
    task = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    run = SimpleNamespace(task=task, trained=list(task.parameters()))
    task[0].bias.requires_grad_(False)
    check_trained(run)
    task[1] = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="^algorithms: .* parameter 1.weight and 1 more, .* `with run.new_parameters"):
        check_trained(run)
    task[1].requires_grad_(False)
    check_trained(run)


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(quick_recipe, fit, tmp_path_factory):
    """12 batches without a stop: two epochs of five batches, and two batches."""
    output = tmp_path_factory.mktemp("whole")
    return output, fit(quick_recipe(output, "checkpoints={every: 5ba, keep: -1, autoresume: false}"))


def test_a_run_goes_on_with_a_parameter_that_had_no_gradient(quick_recipe, tmp_path):
    """PyTorch's optimizers have no state of it."""
    unused = torch.nn.Parameter(torch.ones(3))
    for duration in (1, 2):
        resumes = "checkpoints={every: 1ba, autoresume: true}"
        trainer = build_trainer(
            quick_recipe(tmp_path, f"training.duration={duration}ba", resumes),
            lambda parts: parts.task.register_parameter("unused", unused),
        )
        assert trainer.state.timestamp.batch.value == duration - 1
        trainer.fit()
        trainer.close()
    assert not trainer.state.optimizers[0].state.get(unused) and torch.equal(unused, torch.ones(3))


def test_a_text_in_a_checkpoint_is_not_run_as_code(whole, quick_recipe, tmp_path):
    """Composer evaluates the text of an entry with the name of an algorithm of its own."""
    output, _ = whole
    state = torch.load(next((output / "checkpoints").glob("*ba5-rank0.pt")), weights_only=False)
    code = f"Alibi.__init__.__globals__['__builtins__']['open']({str(tmp_path / 'made')!r}, 'w')"
    state["state"]["algorithms"].append(("Alibi", {"repr": code}))
    torch.save(state, tmp_path / "sent.pt")
    load = f"checkpoints={{load_path: {tmp_path / 'sent.pt'}, autoresume: false}}"
    trainer = build_trainer(quick_recipe(tmp_path / "run", load))
    trainer.close()
    assert trainer.state.timestamp.batch.value == 5 and not (tmp_path / "made").exists()


def test_a_checkpoint_with_a_scaler_that_scales_nothing(whole, quick_recipe, tmp_path):
    """As earlier versions wrote it on a GPU, in all precisions."""
    output, _ = whole
    state = torch.load(next((output / "checkpoints").glob("*ba5-rank0.pt")), weights_only=False)
    assert state["state"]["scaler"] == {"ClosureGradScaler": {}}  # which sharded checkpoints need not have
    state["state"]["scaler"] = {"ClosureGradScaler": torch.amp.GradScaler("cpu").state_dict()}
    torch.save(state, tmp_path / "earlier.pt")
    load = f"checkpoints={{load_path: {tmp_path / 'earlier.pt'}, autoresume: false}}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = build_trainer(quick_recipe(tmp_path / "run", load))
    trainer.close()
    assert trainer.state.timestamp.batch.value == 5
    assert not [w for w in caught if "not in the state_dict" in str(w.message)]


@pytest.mark.parametrize("place", ["rng", "callbacks"])
def test_a_generator_that_would_read_behind_its_numbers_is_refused(whole, quick_recipe, tmp_path, place):
    """NumPy takes any position, and the process ended without a message."""
    output, _ = whole
    state = torch.load(next((output / "checkpoints").glob("*ba5-rank0.pt")), weights_only=False)
    states = state["rng"] if place == "rng" else state["state"]["callbacks"]["Generators"]["generators"]
    states[0]["numpy"] = (*states[0]["numpy"][:2], 10**9, *states[0]["numpy"][3:])
    torch.save(state, tmp_path / "sent.pt")
    load = f"checkpoints={{load_path: {tmp_path / 'sent.pt'}, autoresume: false}}"
    with pytest.raises(ValueError, match="the checkpoint is damaged: NumPy's is at 1000000000"):
        build_trainer(quick_recipe(tmp_path / "run", load))


@pytest.mark.parametrize("workers", [0, 1])
def test_autoresume_in_mid_epoch_changes_nothing(whole, quick_recipe, fit, tmp_path, workers):
    changes = ["checkpoints.autoresume=true", f"data.workers={workers}", f"evals.val.workers={workers}"]
    before = set(active_children())
    first = fit(quick_recipe(tmp_path, "training.duration=7ba", *changes))
    assert first.state.timestamp.batch == 7 and difference(first, whole[1]) > 0
    (tmp_path / "nothing").mkdir()  # first weights, which a run that goes on does not read
    second = fit(quick_recipe(tmp_path, *changes, f"checkpoints.load_weights={tmp_path}/nothing"))
    assert second.state.timestamp.batch == 12
    assert set(active_children()) <= before  # while both trainers are there
    assert difference(second, whole[1]) == 0
    for name, value in whole[1].state.eval_metric_values.items():
        assert second.state.eval_metric_values[name] == value


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_too(whole, quick_recipe, fit, tmp_path):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        resumed = fit(quick_recipe(tmp_path, f"checkpoints.load_path={whole[0]}/checkpoints/ep1-ba10-rank0.pt"))
    assert not [warning for warning in warned if "No batches were trained" in str(warning.message)]
    assert resumed.state.timestamp.batch == 12 and difference(resumed, whole[1]) == 0


def test_a_checkpoint_in_a_store_is_fetched_unless_the_run_has_its_own(quick_recipe, tmp_path, monkeypatch):
    """Where Composer's own client would not do: that of S3 does."""
    asked = []
    monkeypatch.setattr(composer_trainer, "fetched", lambda address, output: asked.append(address) or output / "it")
    for address in ("gs://sets/run/ep0-ba2-rank0.pt", "azure://pictures.blob.core.windows.net/sets/ep0-ba2-rank0.pt"):
        recipe = quick_recipe(tmp_path, f"checkpoints.load_path={address}")
        assert composer_trainer.load_path_of(recipe) == str(tmp_path / "it") and asked.pop() == address
    (tmp_path / "checkpoints" / "ep0-ba4-rank0.pt").mkdir(parents=True)
    recipe.checkpoints.autoresume = True
    assert composer_trainer.load_path_of(recipe) == address and not asked
    for path in (None, "s3://sets/ep0-ba2-rank0.pt"):
        recipe.checkpoints.load_path = path
        assert composer_trainer.load_path_of(recipe) == path and not asked


@pytest.mark.parametrize("name", ["c.tar", "c.tar.gz", "c.tgz", "c.pt.gz", "c.pt.symlink"])
def test_an_archive_is_no_checkpoint(name, quick_recipe, tmp_path):
    """Composer would unpack tars, also to places outside of its folder, write c.pt beside c.pt.gz, and follow links."""
    (tmp_path / name).write_bytes(b"an archive")
    with pytest.raises(ValueError, match=f"{name} is an archive or a link; give the checkpoint that is in it"):
        composer_trainer.load_path_of(quick_recipe(tmp_path, f"checkpoints.load_path={tmp_path / name}"))


def test_a_finished_run_is_seen(whole, quick_recipe, tmp_path):
    path = f"{whole[0]}/checkpoints/ep2-ba12-rank0.pt"
    resumed = build_trainer(quick_recipe(tmp_path, f"checkpoints.load_path={path}"))
    assert clock_of(resumed.state).ended and difference(resumed, whole[1]) == 0
    resumed.close()


# --- what cannot run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.device=gpu"], "training.device: gpu was asked for, and PyTorch sees none; use auto or cpu"),
        (["data.resolution=64"], r"resolution is \[16, 32\], the recipe expects 64"),
        (["model.denoiser.text_width=32"], "text_width is 16, the recipe expects 32"),
        (["model.denoiser.latent_channels=8"], "channels is 4, the recipe expects 8"),
    ],
)
def test_what_cannot_run_is_said(small_recipe, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message) as error:
        build_trainer(small_recipe(tmp_path, *changes))
    assert "\n" not in str(error.value)


def test_of_several_machines_each_needs_a_gpu(quick_recipe, tmp_path, monkeypatch):
    """One whose driver does not work would train on its CPU, and the others wait for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    auto = quick_recipe(tmp_path, "training.device=auto")
    for local, refused in (("2", True), ("4", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with pytest.raises(ValueError, match="sees no GPU on .*; repair its driver, or") if refused else nullcontext():
            parts.Place.of(auto, 2)
        assert not parts.Place.of(quick_recipe(tmp_path, "training.device=cpu"), 2).use_gpu


def test_each_process_needs_a_gpu_of_its_own(quick_recipe, tmp_path, monkeypatch):
    """As many as a machine has, or all but one of them hidden from each process, as some schedulers do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    recipe = quick_recipe(tmp_path, "training.device=auto")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert parts.Place.of(recipe, 2).use_gpu
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="training.device: process 1 of .* has no GPU, as PyTorch sees 1 GPU there"):
        parts.Place.of(recipe, 2)
    assert not parts.Place.of(quick_recipe(tmp_path, "training.device=cpu"), 2).use_gpu


def test_batches_divide_over_devices(quick_recipe, tmp_path, monkeypatch):
    assert quick_recipe(tmp_path).training.device_batch(2) == 4
    monkeypatch.setattr(parts, "world_size", lambda: 3)
    with pytest.raises(ValueError, match="training.global_batch: 8 does not divide over 3 devices"):
        build_trainer(quick_recipe(tmp_path))


def test_replicas_that_nothing_averages_are_refused(quick_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "world_size", lambda: 2)
    recipe = quick_recipe(tmp_path, "training.fsdp={replicas: 2}")
    place = parts.Place(use_gpu=False, precision="fp32", local_world_size=2)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.0+cpu"))
    with pytest.raises(ValueError, match="2 replicas, between which torch 2.7.0.cpu averages no gradients") as error:
        parts.new_sharding(recipe, place, None, [])
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    assert parts.new_sharding(recipe, place, None, []).replicas == 2


def test_weights_of_another_width(exported, small_recipe, tmp_path):
    recipe, _ = exported
    changes = ["model.denoiser.channels=[32,128]", f"checkpoints.load_weights={recipe.output}/export"]
    with pytest.raises(ValueError, match="does not fit the model"):
        build_trainer(small_recipe(tmp_path, *changes))


# --- two processes ---------------------------------------------------------------------------------------------------


def first_samples(source, count, folder):
    """A set of the first samples of another one, without compression."""
    [shard] = LocalDataset(str(source)).shards
    columns = dict(zip(shard.column_names, shard.column_encodings, strict=True))
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for number in range(count):
            writer.write(shard[number])
    for name in (NAME, NULL_TEXT):
        shutil.copy(source / name, folder)
    return folder


@pytest.mark.slow
def test_two_ranks(quick_recipe, latent_sets, tmp_path):
    """One launch of Composer's own launcher, itself a forked process: two new ones on the CPU, joined by gloo."""
    odd = f"evals.val.streams.val.path={first_samples(latent_sets / 'val', 5, tmp_path / 'odd')}"
    recipe = quick_recipe(
        tmp_path / "run", odd, "training.duration=10ba", "data.caption_dropout=0.0",
        "callbacks.throughput={name: throughput, window: 3, communication_every: 2ba}",
    )  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    launcher = Path(sys.executable).with_name("composer")
    script = ROOT / "tests" / "recipes" / "two_ranks.py"
    done = launch(1, launcher, "-n", 2, script, tmp_path / "recipe.yaml", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    # Each epoch is shared: 40 samples in 5 batches of 4 + 4, none twice.
    for epoch in range(2):
        part = slice(20 * epoch, 20 * epoch + 20)
        assert len({*one["seeds"][part], *other["seeds"][part]}) == 40
    assert all(a != b for a, b in zip(one["noise"], other["noise"], strict=True))
    assert all(a != b for a, b in zip(one["losses"], other["losses"], strict=True))
    # The same weights, moved by the mean of both ranks' gradients.
    assert one["initial"] == other["initial"] != one["final"] == other["final"]
    for rank in (one, other):
        assert rank["gradient_error"] < 1e-6 < 1e-4 < rank["gradient_difference"]
    assert one["metrics"] == other["metrics"]
    # DDP's all-reduces take some of a step, and no more than it.
    assert all(0 < rank["communication"] < 1 for rank in (one, other))
    # Both ranks together find what one process finds: noise of validation belongs to the sample, and the one of the
    # five samples that both read counts half for each.
    path = f"{tmp_path}/run/checkpoints/latest-rank0.pt"
    alone = build_trainer(quick_recipe(tmp_path / "alone", odd, f"checkpoints.load_path={path}"))
    alone.eval()
    assert {k: float(v) for k, v in alone.state.eval_metric_values.items()} == pytest.approx(one["metrics"], rel=1e-4)
    alone.close()


def test_a_file_that_is_no_checkpoint_is_named_as_it_was_given(quick_recipe, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("run_name: x")
    with pytest.raises(ValueError, match=f"^{file}: not a checkpoint that this .*: it is cut off, or no file"):
        build_trainer(quick_recipe(tmp_path / "run", f"checkpoints.load_path={file}"))
