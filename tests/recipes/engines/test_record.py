"""A run that goes on is the run that it was: its recipe, and what encoded its data."""

import errno
import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from data.encoded.manifest import Manifest
from data.system.errors import Outage
from data.tokenizers.vocabulary_files import VocabularyFile
from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.engines import dry_run_checks
from recipes.engines.checkpoints import files as checkpoint_files
from recipes.engines.checkpoints.files import CheckpointFiles
from recipes.engines.composer.trainer import build_trainer
from recipes.engines.dry_run_checks import check_on_meta
from recipes.engines.record import ENCODED, changes_of, check_copy, check_encoders, check_record, keep_record, keep_with
from recipes.engines.resuming import prepare_folder
from recipes.models.contrastive.task import ContrastiveText
from recipes.training.checkpoint_names import KINDS
from tests.disks import small_files

ROOT = Path(__file__).parents[3]
BEGUN = ("checkpoints.autoresume=true", "training.duration=7ba")


@pytest.fixture
def begun(quick_recipe, tmp_path):
    """The folder of a run with a record and an (empty) checkpoint."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ep0-ba3-rank0.pt").touch()
    (tmp_path / "config.yaml").write_text(to_yaml(quick_recipe(tmp_path, *BEGUN)))
    return tmp_path


def test_the_same_recipe_goes_on(begun, quick_recipe):
    assert check_record(quick_recipe(begun, *BEGUN)) == []


def test_a_bucket_without_a_recipe_is_said(quick_recipe, tmp_path, capsys):
    """Earlier versions did not write one into latest.json."""
    recipe = quick_recipe(tmp_path, "checkpoints.autoresume=true", "checkpoints.bucket=s3://a/run")
    check_copy(recipe, {})
    (line,) = capsys.readouterr().out.splitlines()
    assert "s3://a/run/latest.json has no recipe" in line
    check_copy(recipe, {"config.yaml": to_yaml(recipe)})
    assert not capsys.readouterr().out


def test_a_dry_run_refuses_what_may_not_go_on(begun, quick_recipe, monkeypatch):
    before = sorted(begun.rglob("*"))
    with pytest.raises(ValueError, match="rank0.pt: not a checkpoint .*; remove .*, and the next start begins anew$"):
        check_on_meta(quick_recipe(begun, *BEGUN))
    monkeypatch.setattr(dry_run_checks, "check_start", lambda *_: None)
    check_on_meta(quick_recipe(begun, *BEGUN))
    for change, said in (("optimizer.lr=1e-3", "optimizer.lr was 0.002"), ("training.engine=lightning", "by Composer")):
        with pytest.raises(ValueError, match=f"^checkpoints.autoresume: .*{said}"):
            check_on_meta(quick_recipe(begun, *BEGUN, change))
        check_on_meta(quick_recipe(begun, *BEGUN, change, "checkpoints.autoresume=false"))
    assert sorted(begun.rglob("*")) == before


@pytest.mark.parametrize(
    "change",
    [
        "training.duration=8ba",
        "training.engine=lightning",
        "training.microbatch=4",
        "training.eval_every=2ba",
        "evals.val=null",
        "data.workers=3",
        "checkpoints.every=1ba",
        "callbacks.progress.seconds=3",
        "loggers={tensorboard: {name: tensorboard}}",
        "optimizer.eps=1e-8",  # the default, which was not written down
    ],
)
def test_what_nothing_depends_on_may_change(begun, quick_recipe, change):
    assert set(check_record(quick_recipe(begun, *BEGUN, change))) <= {"training.duration"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer.lr=1e-3", "optimizer.lr was 0.002, is 0.001"),
        ("training.duration=6ba", "training.duration was '7ba', is '6ba'"),
        ("training.duration=70sp", "training.duration was '7ba', is '70sp'"),
        ("seed=3", "seed was 17, is 3"),
        ("model.denoiser.layers=1", "model.denoiser.layers was 2, is 1"),
        ("schedule={name: cosine}", "schedule was {name: constant, warmup: 2ba}, is {name: cosine"),
        ("algorithms.ema={name: scheduled_ema, decay: 0.9}", "algorithms.ema was None, is {name: scheduled_ema"),
        ("callbacks.b={name: scheduled_value, value: beta, start: 0, end: 1}", "callbacks.b was None"),
        ("data.caption_dropout=0.5", "data.caption_dropout was 0.1, is 0.5"),
        ("training.grad_clip=1", "training.grad_clip was None, is 1.0"),
        ("training.global_batch=16", "training.global_batch was 8, is 16"),
        ("training.precision=fp32", "training.precision was 'auto', is 'fp32'"),
    ],
)
def test_a_changed_recipe_is_refused_by_its_keys(begun, quick_recipe, change, said):
    record = (begun / "config.yaml").read_text()
    changed = quick_recipe(begun, *BEGUN, change)
    with pytest.raises(ValueError, match="checkpoints.autoresume: the recipe is not the one") as error:
        build_trainer(changed)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert (begun / "config.yaml").read_text() == record


def test_a_change_may_be_allowed_by_its_key_or_one_above(begun, quick_recipe):
    changes = ["optimizer.lr=1e-3", "optimizer.weight_decay=0.1", "seed=3"]
    for allowed in ("optimizer,seed", "optimizer.lr,optimizer.weight_decay,seed"):
        recipe = quick_recipe(begun, *BEGUN, *changes, f"checkpoints.allow_changes=[{allowed}]")
        assert set(check_record(recipe)) == {"seed", "optimizer.lr", "optimizer.weight_decay"}


@pytest.mark.parametrize("allowed", [[], ["checkpoints.allow_changes=[optimizer]"]])
def test_the_argument_that_a_refusal_names_can_be_pasted(begun, quick_recipe, allowed):
    """Without quotes a shell made two arguments of it. What was allowed before was missing, and was refused then."""
    changes = ["optimizer.lr=1e-3", "seed=3", *allowed]
    with pytest.raises(ValueError, match="seed was 17, is 3; .*give another output, or go on with ") as error:
        check_record(quick_recipe(begun, *BEGUN, *changes))
    (argument,) = shlex.split(str(error.value).partition("go on with ")[2])
    assert set(check_record(quick_recipe(begun, *BEGUN, *changes, argument))) == {"seed", "optimizer.lr"}


def test_a_callback_that_acts_on_training_may_not_be_removed_either(begun, quick_recipe):
    before = quick_recipe(begun, "callbacks.b={name: scheduled_value, value: beta, start: 0, end: 1}")
    assert [key for key, *_ in changes_of(before, quick_recipe(begun, "callbacks.progress=null"))] == ["callbacks.b"]


def test_the_microbatch_of_a_model_that_compares_its_samples_may_not_change():
    """The loss is another one: 64 captions of which one is to be found, or 8."""
    before, now = (
        load_config(ROOT / "yamls" / "openmoji_text.yaml", [f"training.microbatch={size}"], Recipe)
        for size in ("null", "8")
    )
    assert list(changes_of(before, now)) == [("training.microbatch", None, 8)]
    assert list(changes_of(before, before)) == []
    for recipe in (before, now):
        recipe.model = replace(recipe.model, target=f"{__name__}:by_a_function")
    assert list(changes_of(before, now)) == [("training.microbatch", None, 8)]


def test_nor_may_the_number_of_devices_that_divide_its_batch(tmp_path):
    changes = [f"output={tmp_path}", "training.global_batch=64"]
    recipe = load_config(ROOT / "yamls" / "openmoji_text.yaml", changes, Recipe)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ep0-ba3-rank0.pt").touch()
    check_encoders(recipe, Data, {})  # of an earlier version, which did not write it down
    keep_record(recipe, Data)
    assert json.loads((tmp_path / ENCODED).read_text()) == {"compared": 64}
    check_encoders(recipe, Data, {})
    (tmp_path / ENCODED).write_text('{"compared": 32}')  # of two devices
    with pytest.raises(ValueError, match=f"the loss of {tmp_path} compares 32 samples .* would now compare 64: go on"):
        check_encoders(recipe, Data, {})
    for change in ("training.microbatch=32", "checkpoints.allow_changes=[training.microbatch]"):
        check_encoders(load_config(ROOT / "yamls" / "openmoji_text.yaml", [*changes, change], Recipe), Data, {})


def by_a_function(**args):
    return ContrastiveText(**args)


@pytest.mark.parametrize(
    ("precision", "was", "now", "refused"),
    [
        ("amp_bf16", "{parameters: fp32}", "{parameters: bf16}", "training.fsdp.parameters was 'fp32', is 'bf16'"),
        ("amp_bf16", "{parameters: bf16}", "{parameters: auto, strategy: FULL_SHARD, checkpoints: full}", None),
        ("amp_bf16", "null", "{parameters: bf16}", None),
        ("amp_bf16", "null", "{parameters: fp32}", None),
        ("fp32", "null", "{parameters: bf16}", "training.fsdp was None, is {"),
        ("fp32", "{parameters: auto, wrap: model}", "null", None),
        ("auto", "{parameters: auto}", "{parameters: bf16}", "training.fsdp.parameters was 'auto', is 'bf16'"),
    ],
)
def test_of_sharding_only_the_number_format_matters(begun, quick_recipe, precision, was, now, refused):
    common = (*BEGUN, f"training.precision={precision}")
    (begun / "config.yaml").write_text(to_yaml(quick_recipe(begun, *common, f"training.fsdp={was}")))
    changed = quick_recipe(begun, *common, f"training.fsdp={now}")
    if refused is None:
        assert check_record(changed) == []
    else:
        with pytest.raises(ValueError, match=refused):
            check_record(changed)


def interrupted(*_):
    raise KeyboardInterrupt


class Data:
    """Data that nothing encoded."""

    manifest = vocabulary = samples = None


def test_a_start_that_saved_nothing_changes_nothing_that_later_ones_compare(begun, quick_recipe, monkeypatch):
    """Until a checkpoint is written with a changed recipe, each start sees the change."""
    old = quick_recipe(begun, *BEGUN)
    new = quick_recipe(begun, *BEGUN, "optimizer.lr=1e-3", "checkpoints.allow_changes=[optimizer]")
    link = begun / "checkpoints" / "latest-rank0.pt"
    anew = quick_recipe(begun, *BEGUN, "seed=3", "checkpoints.autoresume=false")
    assert prepare_folder(anew, "lightning") == [] and not link.is_symlink()
    for _ in range(2):
        assert prepare_folder(new, "composer") == ["optimizer.lr"]
        assert link.resolve().name == "ep0-ba3-rank0.pt"  # which Composer itself looks for
        keep_record(new, Data)
    assert "0.001" in (begun / "config.yaml").read_text() and prepare_folder(old, "composer") == []
    (begun / "config.yaml").unlink()  # a process that was killed while it wrote
    with pytest.raises(ValueError, match="seed was 17, is 3"):
        prepare_folder(quick_recipe(begun, *BEGUN, "seed=3"), "composer")
    keep_record(old, Data)
    newest = begun / "checkpoints" / "ep0-ba4-rank0.pt"
    newest.touch()
    files = CheckpointFiles(newest.parent, KINDS["composer"], keep=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # killed before the link points to it
        patch.setattr(checkpoint_files, "point_to", interrupted)
        files.newest_is(newest, 4)
    keep_record(new, Data)
    assert prepare_folder(new, "composer") == ["optimizer.lr"]
    files.newest_is(newest, 4)
    assert prepare_folder(new, "composer") == []
    assert [path.name for path in (begun / "records").iterdir()] == ["ep0-ba4"]
    with pytest.raises(ValueError, match="optimizer.lr was 0.001, is 0.002"):
        prepare_folder(old, "composer")
    for number in (1, 2):  # both starts with `old` that were followed by one with `new`
        assert "0.002" in (begun / f"config-{number}.yaml").read_text()
    (begun / "config-1.yaml").unlink()
    keep_record(old, Data)
    assert "0.001" in (begun / "config-1.yaml").read_text() and "0.002" in (begun / "config-2.yaml").read_text()
    (begun / "config.yaml").write_bytes(b"run_name: \xf2un")  # a changed bit
    keep_record(old, Data)
    assert "0.002" in (begun / "config.yaml").read_text() and "run_name" in (begun / "config-3.yaml").read_text()


def test_without_a_checkpoint_a_run_begins_anew(begun, quick_recipe):
    (begun / "checkpoints" / "ep0-ba3-rank0.pt").unlink()
    anew = quick_recipe(begun, *BEGUN, "seed=3")
    assert check_record(anew) == []
    keep_record(anew, Data)
    assert "seed: 3" in (begun / "config.yaml").read_text() and not list(begun.glob("config-*.yaml"))


def test_a_record_that_the_disk_refuses_is_one_line(begun):
    said = r"records/ep0-ba4 could not be written \(File too large\); raise the limit of file sizes"
    with small_files(10), pytest.raises(ValueError, match=said):
        keep_with(begun, begun / "checkpoints" / "ep0-ba4-rank0.pt")
    assert not list((begun / "records").glob("*ep0-ba4*"))


def test_a_record_that_a_lost_mount_refuses_does_not_ask_for_room(begun, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    said = r"records/ep0-ba4 could not be written \(Stale file handle\); look at the disk and its mount and start again"
    with pytest.raises(Outage, match=said):  # by which a cluster starts the run again
        keep_with(begun, begun / "checkpoints" / "ep0-ba4-rank0.pt")


def test_a_checkpoint_without_a_record_is_compared_with_nothing(begun, quick_recipe, capsys):
    """As where only the checkpoints were copied."""
    (begun / "config.yaml").unlink()
    assert check_record(quick_recipe(begun, *BEGUN, "seed=3")) == [] and not capsys.readouterr().out


def test_a_record_without_a_recipe_is_said(begun, quick_recipe, capsys):
    (begun / "records" / "ep0-ba3").mkdir(parents=True)
    assert check_record(quick_recipe(begun, *BEGUN, "seed=3")) == []
    said = "records/ep0-ba3/config.yaml: is not there; whether its checkpoint is one of this recipe is not known"
    assert said in capsys.readouterr().out


def test_a_record_of_another_version_is_not_compared(begun, quick_recipe, capsys):
    values = yaml.safe_load((begun / "config.yaml").read_text())
    values["training"]["of_old"] = 1
    (begun / "config.yaml").write_text(yaml.safe_dump(values))
    assert check_record(quick_recipe(begun, *BEGUN, "seed=3")) == []
    assert "not a recipe of this version (training.of_old: unknown key" in capsys.readouterr().out


def test_a_record_that_the_disk_does_not_give_is_not_passed_over(begun, quick_recipe, monkeypatch):
    """The run would go on with whatever recipe this one is."""
    recipe = quick_recipe(begun, *BEGUN)
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(ValueError, match=r"config\.yaml: cannot be read \(Input/output error\)"):
        check_record(recipe)


def test_keys_that_an_earlier_start_allowed_and_nothing_has_do_not_end_the_comparison(begun, quick_recipe):
    values = yaml.safe_load((begun / "config.yaml").read_text())
    values["checkpoints"]["allow_changes"] = ["optimizer.lrr"]  # which earlier versions took
    (begun / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match="seed was 17, is 3"):
        check_record(quick_recipe(begun, *BEGUN, "seed=3"))


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_an_allowed_rate_is_used_and_the_old_record_kept(quick_recipe, tmp_path, engine):
    import importlib

    train = importlib.import_module(f"recipes.engines.{engine}.trainer")
    common = ("checkpoints.autoresume=true", f"training.engine={engine}", "optimizer.lr=1e-3", "schedule.warmup=0ba")
    train.train(quick_recipe(tmp_path, *common, "training.duration=1ba"))
    before = (tmp_path / "config.yaml").read_text()
    changes = ["training.duration=2ba", "optimizer.lr=5e-4", "optimizer.weight_decay=0.5"]
    changed = quick_recipe(tmp_path, *common, *changes, "checkpoints.allow_changes=[optimizer]")
    train.build_trainer(changed).close()  # as one that is killed before its first checkpoint
    again = train.build_trainer(changed)
    if engine == "lightning":
        again.fit()
        (group,) = again.run.optimizer.param_groups
    else:
        again.fit()
        (group,) = again.state.optimizers[0].param_groups
    assert group["initial_lr"] == group["lr"] == 5e-4 and group["weight_decay"] == 0.5
    again.close()
    assert (tmp_path / "config-1.yaml").read_text() == before
    assert "lr: 5e-4" in (tmp_path / "config.yaml").read_text() or "0.0005" in (tmp_path / "config.yaml").read_text()


def of_another_vae(source, folder):
    """A copy of an encoded set that names other weights."""
    shutil.copytree(source, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["image_encoder"]["weights_hash"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_validation_latents_of_another_vae_are_refused(quick_recipe, latent_sets, tmp_path):
    other = of_another_vae(latent_sets / "val", tmp_path / "val")
    with pytest.raises(ValueError, match="evals.val: not encoded as the training data is: .*image_weights is 000"):
        build_trainer(quick_recipe(tmp_path / "run", f"evals.val.streams.val.path={other}"))


def test_a_run_does_not_go_on_with_latents_of_another_vae(quick_recipe, latent_sets, tmp_path):
    other = of_another_vae(latent_sets / "train", tmp_path / "train")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "ep0-ba3-rank0.pt").touch()
    weights = json.loads((latent_sets / "train" / "manifest.json").read_text())["image_encoder"]["weights_hash"]
    for folder, value in ((run, "of a start that saved nothing"), (run / "records" / "ep0-ba3", weights)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ENCODED).write_text(json.dumps({"image_weights": value}))
    for changes, where in (
        ([f"output={run}", "checkpoints.autoresume=true"], run),
        ([f"output={tmp_path}/new", f"checkpoints.load_path={run}/checkpoints/ep0-ba3-rank0.pt"], run),
    ):
        changed = quick_recipe(run, "evals.val=null", f"data.streams.train.path={other}", *changes)
        said = f"data: not encoded as that of {where}, whose checkpoint is loaded: .*, the recipe expects {weights}"
        with pytest.raises(ValueError, match=said):
            build_trainer(changed)
    data = SimpleNamespace(manifest=Manifest.read(other), vocabulary=None, samples=None)
    check_encoders(quick_recipe(run, "checkpoints.autoresume=false"), data, {})
    check_encoders(quick_recipe(run, "checkpoints.autoresume=true", "checkpoints.allow_changes=[data]"), data, {})


def test_weights_that_were_trained_on_latents_of_another_vae_are_warned_of(
    quick_recipe, latent_sets, tmp_path, capsys
):
    export, other = tmp_path / "export", of_another_vae(latent_sets / "train", tmp_path / "train")
    export.mkdir()
    shutil.copy(latent_sets / "train" / "manifest.json", export)
    recipe = quick_recipe(tmp_path / "new", f"checkpoints.load_weights={export}")
    same, now = (
        SimpleNamespace(manifest=Manifest.read(folder), vocabulary=None, samples=None)
        for folder in (latent_sets / "train", other)
    )
    check_encoders(recipe, now, {})  # a pipeline of diffusers, whose encoders may have other hashes
    (export / "export.json").write_text("{}")
    check_encoders(recipe, same, {})
    assert not capsys.readouterr().out
    check_encoders(recipe, now, {})
    then = same.manifest.image_encoder["weights_hash"]
    said = f"{export}/manifest.json: the weights were trained on data that other encoders made: image_weights was "
    assert f"{said}{then}" in capsys.readouterr().out
    (export / "unet_ema").mkdir()  # its network alone
    check_encoders(quick_recipe(tmp_path / "new", f"checkpoints.load_weights={export}/unet_ema"), now, {})
    assert f"{said}{then}" in capsys.readouterr().out


def test_weights_that_were_trained_with_another_vocabulary_are_warned_of(quick_recipe, tmp_path, capsys):
    export, other = tmp_path / "export", tmp_path / "other.json"
    export.mkdir()
    (export / "export.json").write_text("{}")
    (export / "vocabulary.json").write_text("then")
    other.write_text("then")
    recipe = quick_recipe(tmp_path / "new", f"checkpoints.load_weights={export}")

    def data():
        return SimpleNamespace(manifest=None, vocabulary=VocabularyFile.read(other), samples=None)

    check_encoders(recipe, data(), {})
    assert not capsys.readouterr().out
    other.write_text("now")  # with as many entries
    check_encoders(recipe, data(), {})
    said = f"{export}/vocabulary.json: the weights were trained with another vocabulary than {other}; they have to "
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_damaged_record_of_the_encoders_is_named(text, quick_recipe, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ENCODED).write_text(text)
    path = tmp_path / "run" / "checkpoints" / "ep0-ba1-rank0.pt"
    path.touch()
    recipe = quick_recipe(tmp_path / "new", f"checkpoints.load_path={path}")
    with pytest.raises(ValueError, match=f"{tmp_path}/run/{ENCODED}: damaged .*; copy the run's folder again"):
        check_encoders(recipe, SimpleNamespace(manifest=None, vocabulary=None, samples=None), {})


def test_the_record_says_what_encoded_the_data(quick_recipe, tmp_path):
    keep_record(quick_recipe(tmp_path), Data)
    assert not (tmp_path / ENCODED).exists()
    encoders = {"image_encoder": {"weights_hash": "0"}}
    manifest = SimpleNamespace(encoders=lambda: encoders)
    keep_record(quick_recipe(tmp_path), SimpleNamespace(manifest=manifest, vocabulary=None, samples=None))
    assert json.loads((tmp_path / ENCODED).read_text()) == encoders


def test_a_set_that_has_grown_is_warned_of(quick_recipe, tmp_path, capsys):
    run = tmp_path / "run"
    path = run / "checkpoints" / "ep0-ba3-rank0.pt"
    path.parent.mkdir(parents=True)
    path.touch()
    recipe = quick_recipe(run, "checkpoints.autoresume=true")
    before, now = (SimpleNamespace(manifest=None, vocabulary=None, samples=n) for n in (100, 120))
    keep_record(recipe, before)
    check_encoders(recipe, before, {})
    # A new run from the weights of another.
    check_encoders(quick_recipe(tmp_path / "new", f"checkpoints.load_path={path}"), now, {})
    assert not capsys.readouterr().out
    for changes in ([], ["checkpoints.allow_changes=[data]"]):
        check_encoders(quick_recipe(run, "checkpoints.autoresume=true", *changes), now, {})
        assert f"data: an epoch of {run} had 100 samples at its checkpoint and has 120 now." in capsys.readouterr().out


def test_captions_are_encoded_with_one_vocabulary(quick_recipe, tmp_path):
    """Of a set of packed texts, which names no encoders. One of the same size would go unnoticed."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "ep0-ba3-rank0.pt").touch()
    own, other = (tmp_path / name for name in ("own.json", "other.json"))
    own.write_text("[1]")
    other.write_text("[2]")
    files = [VocabularyFile.read(path) for path in (own, other)]
    data, changed = (SimpleNamespace(manifest=None, vocabulary=file, samples=None) for file in files)
    recipe = quick_recipe(tmp_path / "run", "checkpoints.autoresume=true")
    check_encoders(recipe, data, {})  # an earlier version has not noted it
    keep_record(recipe, data)
    check_encoders(recipe, data, {"val": data})
    with pytest.raises(ValueError, match=f"^evals.val: the vocabulary {other} .* is not that of the training data"):
        check_encoders(recipe, data, {"val": changed})
    with pytest.raises(ValueError, match=f"^data: the vocabulary {other} .* is not that of {tmp_path}/run, whose"):
        check_encoders(recipe, changed, {})
    check_encoders(quick_recipe(tmp_path / "run", "checkpoints.allow_changes=[data]"), changed, {})
    check_encoders(quick_recipe(tmp_path / "new"), changed, {})
    unknown = SimpleNamespace(manifest=None, vocabulary=None, samples=None)  # of data of your own that does not say it
    check_encoders(recipe, unknown, {"val": data})
