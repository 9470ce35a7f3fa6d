import json
import shutil

import pytest

from recipes.doctor import main
from recipes.planning.dry_run import disk_bytes, survey
from recipes.planning.recipe_checks import cheap_recipe_checks, disk, recipe_checks


def levels(findings):
    return {finding.subject: finding.level for finding in findings}


def test_a_recipe_that_fits(small_recipe, tmp_path):
    assert levels(recipe_checks(small_recipe(tmp_path / "run"), [])) == {"encoders": "ok", "recipe": "ok", "disk": "ok"}


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
    (found,) = cheap_recipe_checks(recipe)
    assert found.level == "error" and encoder.replace("_", " ") in found.text
    assert found.text.startswith("evals.val.streams.val and data.streams.train were encoded with different weights")


@pytest.mark.parametrize(("limit", "level"), [("1kb", "error"), ("300kb", "warning"), ("1gb", "ok")])
def test_caches(small_recipe, tmp_path, limit, level):
    assert levels(cheap_recipe_checks(small_recipe(tmp_path / "run", f"data.cache_limit={limit}")))["cache"] == level


def test_disk(small_recipe, tmp_path):
    recipe = small_recipe(tmp_path / "run", "checkpoints.every=2ba", "checkpoints.keep=2")
    found = survey(recipe)
    # Weights and two moments, all in 32 bits; two are kept while the third is written.
    assert disk_bytes(recipe, found) == 3 * 12 * found.parameters
    assert disk_bytes(small_recipe(tmp_path / "run", "checkpoints.save=false"), found) == 0
    assert disk(tmp_path / "new" / "run", 10, lambda folder: 10).level == "ok"
    full = disk(tmp_path / "new" / "run", 11, lambda folder: 10)
    assert full.level == "error" and "lower checkpoints.keep" in full.text


def test_the_command(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(":")[1].strip() for line in lines} >= {"python", "packages", "GPU", "attention", "threads"}
    assert main(["yamls/sd2_base.yaml", "data.streams.train.path=/nowhere"]) == 1
    assert "error:   input: not there: data.streams.train.path" in capsys.readouterr().out
