"""What a run says of `checkpoints.load_weights` that are another model's."""

import re
import shutil

import pytest

from data.system.files import write_json
from recipes.config.build import build, build_on_meta
from recipes.engines.first_weights import load_first_weights, started_from
from recipes.models.kl_autoencoder.task import KLAutoencoder


@pytest.mark.parametrize("one", ["unet", "dit"])
def test_weights_of_another_denoiser(small_recipe, tmp_path, one):
    folder, other = tmp_path / "export", {"unet": "dit", "dit": "unet"}[one]
    task = build(small_recipe(tmp_path, denoiser=one).model)
    task.export(folder)
    for name in ("export.json", "done.json"):
        write_json(folder / name, task.export_record())
    recipe = small_recipe(tmp_path, denoiser=other)
    recipe.checkpoints.load_weights = str(folder)
    said = f"holds the weights of latent_diffusion with the denoiser {one}, and the recipe builds latent_diffusion with"
    with pytest.raises(ValueError, match=f"{said} the denoiser {other} .*no such") as error:
        load_first_weights(recipe, build_on_meta(recipe.model))
    assert "\n" not in str(error.value)
    recipe.checkpoints.load_weights = str(tmp_path)  # of the run, not of its export
    with pytest.raises(ValueError, match=f"load_weights: {tmp_path} is the folder of a run; give {folder}$"):
        load_first_weights(recipe, build_on_meta(recipe.model))


def test_weights_of_another_family(small_recipe, tmp_path):
    """A network of diffusers by its class; one of the same class that has other sizes needs no such word."""
    KLAutoencoder(channels=[8], norm_groups=4).export(tmp_path / "vae")
    recipe = small_recipe(tmp_path)
    recipe.checkpoints.load_weights = str(tmp_path / "vae")
    said = "holds the weights of AutoencoderKL, and the recipe builds latent_diffusion with the denoiser unet "
    with pytest.raises(ValueError, match=said):
        load_first_weights(recipe, build_on_meta(recipe.model))
    build(recipe.model).export(tmp_path / "unet")
    recipe = small_recipe(tmp_path, "model.denoiser.channels=[32,128]")
    for folder in (tmp_path / "unet", tmp_path / "unet" / "unet"):
        recipe.checkpoints.load_weights = str(folder)
        with pytest.raises(ValueError, match=f"^{re.escape(str(folder))}.* does not fit the model: "):
            load_first_weights(recipe, build_on_meta(recipe.model))


def test_a_pipeline_with_another_network(small_recipe, tmp_path):
    build(small_recipe(tmp_path).model).export(tmp_path / "pipeline")  # which writes a folder `unet` as diffusers does
    recipe = small_recipe(tmp_path, denoiser="dit")
    recipe.checkpoints.load_weights = str(tmp_path / "pipeline")
    said = "pipeline holds the weights of UNet2DConditionModel, and the recipe builds .* the denoiser dit "
    with pytest.raises(ValueError, match=said):
        load_first_weights(recipe, build_on_meta(recipe.model))


@pytest.mark.parametrize(
    ("folder", "name"),
    [("sd2_base/export", "sd2_base"), ("stable-diffusion-2-base", "stable-diffusion-2-base"), ("other/unet", "other")],
)
def test_the_name_of_the_model_that_a_run_starts_with(small_recipe, tmp_path, folder, name):
    """It goes into export.json and the model card, which a path of the machine should not."""
    recipe = small_recipe(tmp_path)
    assert started_from(recipe) is None
    recipe.checkpoints.load_weights = str(tmp_path / folder)
    assert started_from(recipe) == name  # also if it has been removed since
    (tmp_path / folder).mkdir(parents=True)
    write_json(tmp_path / folder / "export.json", {"run_name": "phase_1"})
    assert started_from(recipe) == "phase_1"
    # If it is removed after the run's first export, that has the name.
    write_json(tmp_path / "export" / "export.json", {"run_name": "phase_2", "started_from": "phase_1"})
    shutil.rmtree(tmp_path / folder)
    assert started_from(recipe) == "phase_1"
    assert started_from(recipe, tmp_path / "moved") == name
    (tmp_path / folder).mkdir()
    assert started_from(recipe) == name


@pytest.mark.parametrize("network", ["unet", "unet_ema", "transformer"])
def test_the_name_of_the_model_of_a_network_in_an_export(small_recipe, tmp_path, network):
    recipe = small_recipe(tmp_path)
    recipe.checkpoints.load_weights = str(tmp_path / "sd2_base" / "export" / network)
    assert started_from(recipe) == "sd2_base"
    (tmp_path / "sd2_base" / "export" / network).mkdir(parents=True)
    write_json(tmp_path / "sd2_base" / "export" / "export.json", {"run_name": "phase_1"})
    assert started_from(recipe) == "phase_1"


def test_weights_that_are_a_file(small_recipe, tmp_path):
    """Such as a checkpoint, or the published 512-base-ema.safetensors."""
    recipe, file = small_recipe(tmp_path), tmp_path / "512-base-ema.safetensors"
    file.write_bytes(b"")
    recipe.checkpoints.load_weights = str(file)
    with pytest.raises(ValueError, match=f"^checkpoints.load_weights: {file} is a file; give the folder of an export"):
        load_first_weights(recipe, build_on_meta(recipe.model))


def test_weights_that_do_not_exist_while_the_bucket_has_no_checkpoint(small_recipe, tmp_path):
    """The check of the config lets them pass; the message named neither the key nor the bucket."""
    recipe, folder = small_recipe(tmp_path, "checkpoints.bucket=s3://runs/one"), tmp_path / "typo"
    recipe.checkpoints.load_weights = str(folder)
    said = f"^checkpoints.load_weights: `{folder}` does not exist, and s3://runs/one has no checkpoint to go on from$"
    with pytest.raises(FileNotFoundError, match=said):
        load_first_weights(recipe, build_on_meta(recipe.model))


@pytest.mark.parametrize("averaged", [False, True])
def test_weights_beside_their_average(small_recipe, tmp_path, capsys, averaged):
    """The weights as trained are taken, and a line says so: other commands take the average."""
    recipe = small_recipe(tmp_path)
    task = build(recipe.model)
    recipe.checkpoints.load_weights = str(tmp_path / "export")
    task.export(tmp_path / "export")
    if averaged:
        task.export_average(tmp_path / "export")
    record = {"average": {"decay": 0.9, "every": 1, "begun": 1}} if averaged else {}
    write_json(tmp_path / "export" / "export.json", task.export_record() | record)
    load_first_weights(recipe, build(recipe.model))
    said = capsys.readouterr()
    assert ("the weights as trained; " in said.out + said.err) == averaged


@pytest.mark.parametrize(
    ("record", "complete", "said"),
    [({}, False, True), ({}, True, False), ({"weights": "as trained"}, False, False)],
)
def test_weights_of_a_run_that_has_not_ended(small_recipe, tmp_path, capsys, record, complete, said):
    """As where phase 2 of Stable Diffusion 2 is started while phase 1 still trains."""
    recipe = small_recipe(tmp_path)
    task = build(recipe.model)
    recipe.checkpoints.load_weights = str(tmp_path / "export")
    task.export(tmp_path / "export")
    write_json(tmp_path / "export" / "export.json", {"batches": 310_000} | record | task.export_record())
    if complete:
        write_json(tmp_path / "export" / "done.json", {})
    load_first_weights(recipe, build(recipe.model))
    assert ("is of batch 310000 of a run that has not ended" in capsys.readouterr().out) == said
