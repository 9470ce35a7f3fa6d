import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes import train
from recipes.checking import recipe as checks
from recipes.checking.encoded_sets import caches, fetch_indexes, hashes, shards
from recipes.checking.recipe import cheap_recipe_checks, disk, recipe_checks
from recipes.config.components import COMPONENTS
from recipes.config.recipe import to_yaml
from recipes.config.values import Component
from recipes.doctor import main
from recipes.planning.dry_run import disk_bytes, problems, survey
from recipes.planning.inputs import absent_inputs

EXPORT = "callbacks.export={name: export, every: 4ba}"


def levels(findings):
    return {finding.subject: finding.level for finding in findings}


def test_a_recipe_that_fits(small_recipe, tmp_path):
    found = levels(recipe_checks(small_recipe(tmp_path / "run", "data.workers=2"), []))
    assert found == dict.fromkeys(("encoders", "shards", "recipe", "attention", "disk"), "ok")


def test_what_is_missing_and_what_does_not_fit(small_recipe, tmp_path):
    recipe = small_recipe(tmp_path / "run", "model.denoiser.text_width=32")
    found = {finding.subject: finding for finding in recipe_checks(recipe, ["data.streams.x.path: `x` does not exist"])}
    assert found["input"].level == found["recipe"].level == "error" and "disk" not in found
    assert "does not exist" in found["input"].text and "text_width" in found["recipe"].text


def other_set(latent_sets, folder, **changes):
    """A copy of the validation set whose manifest says something else."""
    shutil.copytree(latent_sets / "val", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for encoder, digest in changes.items():
        manifest[encoder]["weights_hash"] = digest
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("encoder", ["image_encoder", "text_encoder"])
def test_sets_of_different_encoders(small_recipe, latent_sets, tmp_path, encoder):
    folder = other_set(latent_sets, tmp_path / "set", **{encoder: "0" * 64})
    recipe = small_recipe(tmp_path / "run", f"evals.val.streams.val.path={folder}")
    (found,) = (finding for finding in cheap_recipe_checks(recipe) if finding.subject == "encoders")
    assert found.level == "error" and encoder.replace("_", " ") in found.text
    assert found.text.startswith("evals.val.streams.val and data.streams.train were encoded with different weights")


def test_what_draws_images_needs_the_encoders_of_the_data(small_recipe, latent_sets, tmp_path):
    """They may lie on the machine that encoded it only."""
    shutil.copytree(latent_sets / "train", tmp_path / "set")
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    manifest["image_encoder"]["component"]["path"] = "/nowhere/vae"
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    grid = "callbacks.grid={name: sample_grid, prompts: [a]}"
    for changes, lines in (([grid], []), ([grid, f"data.streams.train.path={tmp_path}/set"], ["data.streams.train: "])):
        recipe = small_recipe(tmp_path / "run", *changes)
        found = [finding for finding in recipe_checks(recipe, []) if finding.subject == "input"]
        assert [finding.text.partition("not there: ")[2].partition("manifest.")[0] for finding in found] == lines
        assert all("image_encoder.path: `/nowhere/vae` does not exist" in finding.text for finding in found)
    assert not absent_inputs(small_recipe(tmp_path / "run", changes[1]), [])  # nothing draws


@pytest.mark.parametrize(("text", "fault"), [("{", "not JSON"), ('{"version": 2, "shards": [{}]}', "shard 0: is")])
def test_a_damaged_index_is_said_in_one_line(small_recipe, latent_sets, tmp_path, text, fault):
    shutil.copytree(latent_sets / "train", tmp_path / "set")
    (tmp_path / "set" / "index.json").write_text(text)
    recipe = small_recipe(tmp_path / "run", f"data.streams.train.path={tmp_path}/set")
    with pytest.raises(ValueError, match=f"set/index.json: {fault}"):
        list(cheap_recipe_checks(recipe))


def test_a_folder_without_a_set(small_recipe, latent_sets, tmp_path):
    """The run would be refused when it opens the set."""
    (tmp_path / "set").mkdir()
    recipe = small_recipe(tmp_path / "run", f"evals.val.streams.val.path={tmp_path}/set")
    (line,) = absent_inputs(recipe, [])
    assert line.startswith(f"evals.val.streams.val.path: `{tmp_path}/set` has no manifest.json; write the set first")
    recipe = small_recipe(tmp_path / "run", f"data.streams.train.path={latent_sets}")  # `out` of the encode job
    assert absent_inputs(recipe, [])[0].endswith(f"has no manifest.json; give {latent_sets}/train")


@pytest.mark.parametrize(("limit", "level"), [("1kb", "error"), ("300kb", "warning"), ("1gb", "ok")])
def test_caches(small_recipe, tmp_path, limit, level):
    assert levels(cheap_recipe_checks(small_recipe(tmp_path / "run", f"data.cache_limit={limit}")))["cache"] == level


def test_a_hash_that_the_shards_do_not_have(small_recipe, tmp_path):
    """The run would be refused when it opens the set."""
    recipe = small_recipe(tmp_path / "run", "evals.val.streams.val.validate_hash=sha1")
    (found,) = hashes(recipe)
    assert found.level == "error" and found in list(cheap_recipe_checks(recipe))
    assert found.text.startswith("evals.val.streams.val.validate_hash is sha1, and the set was written with xxh3_64; ")
    assert not list(hashes(small_recipe(tmp_path / "run", "evals.val.streams.val.validate_hash=xxh3_64")))


def test_a_dry_run_refuses_what_the_start_would(small_recipe, tmp_path, monkeypatch, capsys):
    yaml = tmp_path / "small.yaml"
    yaml.write_text(to_yaml(small_recipe(tmp_path / "run", "data.cache_limit=1kb")))
    for flags in (["--dry-run"], []):
        monkeypatch.setattr(sys, "argv", ["recipes/train.py", str(yaml), *flags])
        with pytest.raises(SystemExit, match="2"):
            train.main()
        assert capsys.readouterr().err.startswith("error: cache: data.cache_limit is 1kb, shards have up to ")


def test_a_cache_limit_that_is_no_size(small_recipe, tmp_path):
    """It is one line, also before the first shards are here."""
    recipe = small_recipe(tmp_path / "run", "data.cache_limit=10gigs")
    for _ in range(2):
        (found,) = caches(recipe)
        assert found.level == "error" and found.text == "data.cache_limit is 10gigs; give a size such as 100gb"
        recipe.data.args["streams"] = {"train": remote_stream("/nowhere", tmp_path / "none")}


def encoder_bytes(latent_sets):
    """Of the folders that exports of the small recipe copy."""
    manifest = json.loads((latent_sets / "train" / "manifest.json").read_text())
    folders = [Path(manifest[name]["component"]["path"]) for name in ("image_encoder", "text_encoder")]
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())


def test_disk(small_recipe, latent_sets, tmp_path, monkeypatch):
    recipe = small_recipe(tmp_path / "run", "checkpoints.every=2ba", "checkpoints.keep=2", EXPORT)
    found = survey(recipe)
    # Weights and two moments, all in 32 bits; two are kept while the third is written.
    # The export is written whole once more before the one before goes.
    export = 2 * (4 * found.parameters + encoder_bytes(latent_sets))
    assert disk_bytes(recipe, found) == 3 * 12 * found.parameters + export
    assert disk_bytes(small_recipe(tmp_path / "run", "checkpoints.save=false", EXPORT), found) == export
    # One that is saved at the end alone, and as many as are kept where a slow run saves more.
    for minutes, held in (("null", 1), ("60", 3)):
        rare = small_recipe(tmp_path / "run", f"checkpoints={{every: null, keep: 2, minutes: {minutes}}}", EXPORT)
        assert disk_bytes(rare, found) == held * 12 * found.parameters + export
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    assert disk(tmp_path / "new" / "run", 10).level == "ok"
    full = disk(tmp_path / "new" / "run", 11)
    assert full.level == "error" and "lower checkpoints.keep" in full.text
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)  # of another user
    assert disk(tmp_path / "run", 0).text == f"nothing can be written into {tmp_path} for {tmp_path}/run: set `output`"


def test_the_command(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(":")[1].strip() for line in lines} >= {"python", "packages", "GPU", "attention", "threads"}
    assert main(["yamls/sd2_base.yaml", "data.streams.train.path=/nowhere"]) == 1
    assert "error:   input: not there: data.streams.train.path" in capsys.readouterr().out


def test_a_run_that_goes_on_needs_room_for_what_is_not_there_yet(small_recipe, latent_sets, tmp_path, monkeypatch):
    """Here for the third checkpoint and the second export; before it is the doctor's word, it is a start's warning."""
    recipe = small_recipe(tmp_path / "run", "checkpoints.every=2ba", "checkpoints.keep=2", EXPORT)
    parameters = survey(recipe).parameters
    for batch in (2, 4, 6):  # one that is removed next
        path = tmp_path / "run" / "checkpoints" / f"ep0-ba{batch}-rank0.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(12 * parameters)
    (tmp_path / "run" / "export").mkdir()
    export = 4 * parameters + encoder_bytes(latent_sets)
    (tmp_path / "run" / "export" / "weights").write_bytes(bytes(export))
    needed = 12 * parameters + export
    cases = [(needed, "ok", "ok"), (needed - 1, "error", "ok"), (12 * parameters - 1, "error", "warning")]
    for free, doctor, start in cases:
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert levels(recipe_checks(recipe, []))["disk"] == doctor
        assert levels(cheap_recipe_checks(recipe))["disk"] == start
    monkeypatch.setenv("RANK", "1")
    assert "disk" not in levels(cheap_recipe_checks(recipe))


def test_checkpoints_that_are_removed_meanwhile(small_recipe, tmp_path, monkeypatch):
    """The run before may still save, and remove what it does not keep, when the next one starts and looks."""
    recipe = small_recipe(tmp_path / "run", "checkpoints.keep=2")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "ep0-ba2").mkdir(parents=True)
    for name in ("ep0-ba1", "ep0-ba2/part", "ep0-ba3"):
        (folder / name).write_bytes(b"1234")
    looks = {folder / "ep0-ba1": 0, folder / "ep0-ba2" / "part": 1}  # before it is gone
    stat = Path.stat

    def late(path, **options):
        if path in looks and os.path.exists(path):
            if not looks[path]:
                os.unlink(path)
            looks[path] -= 1
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", late)
    assert sorted(checks.held_checkpoints(recipe)) == [0, 4] and not any(map(os.path.exists, looks))


def test_every_problem_is_listed(small_recipe, tmp_path, monkeypatch):
    """Of the batch, of the model, of a set and of options, where a run would stop at the first."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    wrong = ["training.global_batch=8", "data.resolution=24", "evals.val.caption_dropout=2"]
    batch, data, val = problems(small_recipe(tmp_path / "run", *wrong))
    assert "training.global_batch: 8 does not divide over 3" in batch and "resolution" in data
    assert val == "latents: caption_dropout is a share from 0 to 1, got 2.0"
    recipe = small_recipe(tmp_path / "run", "training.global_batch=8", "model.denoiser.text_width=32")
    batch, *sets = problems(recipe)
    assert len(sets) == 2 and all("cross-attention width" in text for text in sets)  # training and validation


@pytest.mark.parametrize(
    ("batch", "workers", "machines", "remote", "level", "text"),
    [
        (8, 2, 1, False, "ok", "1 machine, 2 workers"),
        (8, 5, 1, False, "ok", "5 workers"),
        (10, 5, 1, False, "warning", "4 batches of each rank, so 1 do nothing: give 4"),
        (12, 4, 1, False, "warning", "3 batches of each rank, so 1 do nothing: give 3"),  # of 40 samples
        (8, 2, 64, True, "warning", "64 machines: machines fetch the same shards"),
        (8, 2, 64, False, "ok", "64 machines, 128 workers"),
    ],
)
def test_shards(small_recipe, latent_sets, tmp_path, monkeypatch, batch, workers, machines, remote, level, text):
    monkeypatch.setenv("WORLD_SIZE", str(machines))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    recipe = small_recipe(tmp_path / "run", f"data.workers={workers}")
    recipe.training.global_batch = batch
    if remote:
        recipe.data.args["streams"] = {"train": remote_stream(f"{latent_sets}/train", f"{latent_sets}/train")}
    (found,) = shards(recipe)
    assert found.level == level and text in found.text


def test_shards_of_data_of_your_own_that_has_no_workers(small_recipe, tmp_path):
    recipe = small_recipe(tmp_path / "run")
    recipe.data.args.pop("workers")
    object.__setattr__(recipe.data, "target", "data.encoded.sets:local_set")  # a builder without the key
    (found,) = shards(recipe)
    assert (found.level, found.text) == ("ok", "data: 4 shards, 1 machine, 0 workers")


def test_the_order_of_an_epoch_in_shared_memory(small_recipe, tmp_path, monkeypatch):
    recipe = small_recipe(tmp_path / "run", "data.workers=1")
    for free, level in ((320, "ok"), (319, "warning")):  # for 40 samples
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        (found,) = shards(recipe)
        assert found.level == level


def remote_stream(url, cache):
    arguments = {"url": str(url), "cache": str(cache)}
    return Component("stream", "remote", arguments, COMPONENTS["stream"]["remote"], "data.streams.train")


def test_a_remote_set_is_known_before_its_first_run(small_recipe, latent_sets, tmp_path):
    """The doctor fetches its index, without which it would say nothing of the cache."""
    recipe = small_recipe(tmp_path / "run", "data.cache_limit=1kb")
    url = f"{latent_sets}/train"
    recipe.data.args["streams"] = {"train": remote_stream(url, tmp_path / "cache")}
    assert "cache" not in levels(cheap_recipe_checks(recipe))
    assert list(fetch_indexes(recipe)) == []
    assert levels(cheap_recipe_checks(recipe))["cache"] == "error"
    recipe.data.args["streams"] = {"train": remote_stream("/nowhere", tmp_path / "none")}
    (found,) = fetch_indexes(recipe)
    assert found.level == "error" and "data.streams.train: /nowhere/manifest.json: cannot be fetched" in found.text


def test_a_remote_set_of_texts_has_a_manifest_of_its_own(small_recipe, tmp_path):
    recipe = small_recipe(tmp_path / "run")
    streams = {"train": remote_stream(tmp_path / "packed", tmp_path / "cache")}
    recipe.data = Component("data", "texts", {"streams": streams}, COMPONENTS["data"]["texts"], "data")
    recipe.evals = {}
    (tmp_path / "packed").mkdir()
    for name in ("text.json", "index.json"):
        (tmp_path / "packed" / name).write_text("{}")
    assert list(fetch_indexes(recipe)) == []
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"text.json", "index.json"}
