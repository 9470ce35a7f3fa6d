"""Checkpoints of both engines, whole and sharded, as folders that other programs open: the same weights, the same
pictures, and one clear line for what cannot be exported."""

import filecmp
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file

from data.encoded.manifest import Manifest
from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.engines.checkpoints.conversion import convert
from recipes.engines.checkpoints.sharded_files import Sharded
from recipes.engines.lightning.checkpoint_format import read_file
from recipes.export import main
from recipes.exporting import write
from recipes.exporting.checkpoints import find_checkpoint, read_checkpoint
from recipes.exporting.native import from_export, training_data
from recipes.exports.folder import export as write_export
from recipes.generation.exports import find_export, find_network, load_pipeline, read_record
from recipes.models.latent_diffusion import diffusers_pipeline
from recipes.models.latent_diffusion.unet import UNet
from tests.disks import fill, read_only, small_disk
from tests.recipes.errors import last_error
from tests.recipes.exporting.runs import a_run

ROOT = Path(__file__).resolve().parents[3]
CAPTIONS = ["a red dot", "a blue star!", ""]
KINDS = [(engine, sharded) for engine in ("composer", "lightning") for sharded in (False, True)]
EMA = "algorithms.scheduled_ema={name: scheduled_ema, half_life: 4ba, start: 3ba}"


def export(*arguments):
    main([str(argument) for argument in arguments])


def refuse(capsys, *arguments):
    return last_error(main, arguments, capsys)


def pictures(pipeline, captions, monkeypatch, **options):
    """Of our own pipeline, before they are rounded to 8 bits: (N, H, W, 3) in [0, 1]."""
    name = "recipes.models.latent_diffusion.pipeline.to_uint8"
    with monkeypatch.context() as patch:
        patch.setattr(name, lambda images: images.permute(0, 2, 3, 1).numpy())
        return pipeline.generate(captions, seeds=list(range(len(captions))), **options)


def theirs(folder, captions, **options):
    """The same of diffusers' pipeline."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(captions))]
    return pipeline(captions, generator=generators, output_type="np", **options).images


def test_a_trained_run_draws_the_same_pictures_in_diffusers(exported, tmp_path, monkeypatch, capsys):
    output = Path(exported[0].output)
    export(output / "checkpoints" / "latest-rank0.pt", tmp_path / "out")
    assert capsys.readouterr().out.endswith(f"{tmp_path}/out (diffusers)\n")
    ours = pictures(load_pipeline(output / "export", "cpu", "fp32"), CAPTIONS, monkeypatch, steps=8, guidance=3.0)
    found = theirs(tmp_path / "out", CAPTIONS, num_inference_steps=8, guidance_scale=3.0)
    assert found.shape == ours.shape == (3, 16, 16, 3)  # the training resolution is the default
    assert ours.std() > 0.05 and np.abs(ours[0] - ours[1]).max() > 0.01
    # The null caption's embedding is stored in 16 bits, and computed in 32 bits by diffusers.
    assert np.abs(found - ours).max() < 1e-3
    # The run's own export gives the same, and there the weights are as the callback wrote them.
    export(output, tmp_path / "raw", "--weights", "raw")
    export(output / "export", tmp_path / "of_export", "--weights", "raw")
    known = load_file(output / "export" / "unet" / "diffusion_pytorch_model.safetensors")
    for folder in ("out", "raw", "of_export"):
        written = load_file(tmp_path / folder / "unet" / "diffusion_pytorch_model.safetensors")
        assert written.keys() == known.keys() and all(torch.equal(written[name], known[name]) for name in known)
    assert not list(tmp_path.glob(".*"))
    configs = [file.read_text() for file in (tmp_path / "out").rglob("*.json")]
    assert len(configs) > 5 and not any(str(tmp_path) in text for text in configs)  # who gets it learns no folder


@pytest.mark.parametrize(
    ("asked", "copied", "said"),
    [(None, "unet_ema", "averaged"), ("ema", "unet_ema", "averaged"), ("raw", "unet", "as trained")],
)
def test_a_copy_of_an_export_has_one_kind_of_weights_and_says_which(tmp_path, asked, copied, said):
    record = {"family": "latent_diffusion", "denoiser": "unet", "network": "unet"}
    record |= {"run_name": "run", "batches": 5, "samples": 40}
    for name in ("unet", "unet_ema"):
        (tmp_path / "export" / name).mkdir(parents=True)
        (tmp_path / "export" / name / "config.json").write_text(name)
    for name, text in {"export.json": json.dumps(record), "done.json": "{}", "vocabulary.json": "{}"}.items():
        (tmp_path / "export" / name).write_text(text)
    write.write_export(tmp_path / "export", tmp_path / "copy", weights=asked, layout="native")
    files = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*.json")}
    assert files == {"export.json", "vocabulary.json", "unet/config.json"}  # done.json is of the run
    assert (tmp_path / "copy" / "unet" / "config.json").read_text() == copied
    assert json.loads((tmp_path / "copy" / "export.json").read_text())["weights"] == said
    assert f"| Weights | {said} |" in (tmp_path / "copy" / "README.md").read_text()


def test_a_copy_with_averaged_weights_only_says_so_again(tmp_path):
    network = tmp_path / "average" / "transformer"
    network.mkdir(parents=True)
    (network / "config.json").write_text("{}")
    record = {"family": "autoregressive", "network": "transformer", "weights": "averaged"}
    (tmp_path / "average" / "export.json").write_text(json.dumps(record))
    for number, asked in enumerate((None, "ema")):
        copy = tmp_path / str(number)
        from_export(tmp_path / "average", copy, asked)
        assert read_record(copy)["weights"] == "averaged" and find_network(copy, asked) == copy / "transformer"
    with pytest.raises(FileNotFoundError, match="--weights raw: .* holds the averaged weights only; use ema"):
        from_export(tmp_path / "average", tmp_path / "raw", "raw")


def test_a_pipeline_holds_all_its_parts(small_recipe, tmp_path):
    def of_a_frozen_bias_and_16_bits(state):
        del state["levers"]["ScheduledEMA"]["average"]["denoiser.network.conv_in.bias"]
        state["weights"][f"denoiser.network.{of_16_bits}"] = state["weights"][f"denoiser.network.{of_16_bits}"].half()
        return state

    of_16_bits = "conv_in.weight"
    (tmp_path / "first" / "export").mkdir(parents=True)
    recipe = small_recipe(tmp_path / "run", EMA, f"checkpoints.load_weights={tmp_path}/first/export")
    path, task = a_run(recipe, earlier=of_a_frozen_bias_and_16_bits)
    export(path, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["text_encoder"] == ["transformers", "CLIPTextModel"]
    assert index["tokenizer"] == ["transformers", "CLIPTokenizer"]
    scheduler = json.loads((tmp_path / "out" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == recipe.model.args["objective"].args.get("prediction", "epsilon")
    written = load_file(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")
    known = task.denoiser.network.state_dict()
    averaged = {name: tensor / (1 if name == "conv_in.bias" else 2) for name, tensor in known.items()}
    assert all(torch.equal(written[name], averaged[name]) for name in known)
    export(path, tmp_path / "raw", "--weights", "raw", "--layout", "native")
    written = load_file(tmp_path / "raw" / "unet" / "diffusion_pytorch_model.safetensors")
    known[of_16_bits] = known[of_16_bits].half().float()
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert all(torch.equal(written[name], known[name]) for name in known)
    opened = UNet2DConditionModel.from_pretrained(tmp_path / "raw" / "unet", low_cpu_mem_usage=False).state_dict()
    assert all(torch.equal(opened[name], known[name]) for name in known)
    card = (tmp_path / "raw" / "README.md").read_text()
    assert "as trained" in card and "in a checkout of Precompose" in card and "no other program" not in card
    assert not list((tmp_path / "out").rglob("*.bin")) and not list((tmp_path / "out").rglob("*.pt"))
    card = (tmp_path / "out" / "README.md").read_text()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for fact in (
        recipe.run_name,
        "5 batches, 40 samples",
        "averaged",
        "weights of first",
        "16 pixels",
        "library_name: diffusers",
        "pipeline_tag: text-to-image",
        manifest["image_encoder"]["weights_hash"],
        manifest["text_encoder"]["weights_hash"],
        'StableDiffusionPipeline.from_pretrained("out")',
    ):
        assert fact in card, fact


def test_rectified_flow_in_diffusers(small_recipe, tmp_path, monkeypatch):
    # More than one channel per group: norms of single values would amplify rounding.
    recipe = small_recipe(tmp_path / "run", "model.objective={name: rectified_flow}", "model.denoiser.norm_groups=8")
    path, _ = a_run(recipe, average=False)
    export(path, tmp_path / "out")
    export(path, tmp_path / "native", "--layout", "native")
    steps = 8
    pipeline = load_pipeline(find_export(tmp_path / "native"), "cpu", "fp32")
    ours = pictures(pipeline, CAPTIONS, monkeypatch, steps=steps, guidance=3.0)
    sigmas = np.linspace(1, 0, steps, endpoint=False)
    found = theirs(tmp_path / "out", CAPTIONS, sigmas=sigmas, guidance_scale=3.0)
    assert np.abs(found - ours).max() < 1e-3
    # The scheduler's own times differ by up to 0.001.
    found = theirs(tmp_path / "out", CAPTIONS, num_inference_steps=steps, guidance_scale=3.0)
    assert np.abs(found - ours).max() < 1e-2


def test_a_denoiser_that_diffusers_does_not_have(small_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(UNet, "for_diffusers")  # what is left is every denoiser's
    path, _ = a_run(small_recipe(tmp_path / "run"), average=False)
    error = refuse(capsys, path, tmp_path / "out", "--layout", "diffusers")
    assert "--layout diffusers: diffusers has no pipeline for the denoiser unet; use native" in error
    assert not (tmp_path / "out").exists()
    export(path, tmp_path / "out")
    said = capsys.readouterr().out
    assert "written in the native layout" in said and said.endswith("(native)\n")
    assert find_export(tmp_path / "out") == tmp_path / "out"


@pytest.mark.parametrize(("engine", "sharded"), KINDS)
def test_checkpoints_of_both_engines(small_recipe, tmp_path, engine, sharded):
    recipe = small_recipe(tmp_path / "run", EMA)
    path, task = a_run(recipe, engine, sharded)
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(path) == path
    assert find_checkpoint(path.parent / ("latest-rank0.pt" if engine == "composer" else "latest")) == path
    (path.parent / ("latest-rank0.pt" if engine == "composer" else "latest")).unlink()
    assert find_checkpoint(tmp_path / "run") == path
    found = read_checkpoint(path)
    known = task.state_dict()
    assert (found.batches, found.samples) == (5, 40)
    assert found.weights.keys() == known.keys()
    assert found.average.keys() == {name for name, _ in task.named_parameters()}
    assert all(torch.equal(tensor, known[name]) for name, tensor in found.weights.items())
    assert all(torch.equal(tensor, known[name] / 2) for name, tensor in found.average.items())
    if sharded:  # as a full one of either engine, too, with the rest of the lever's state
        for reader in ("composer", "lightning"):
            new = convert(path, reader)
            average = read_checkpoint(new).average
            assert average.keys() == found.average.keys()
            assert all(torch.equal(tensor, found.average[name]) for name, tensor in average.items())
        assert read_file(new)["levers"]["ScheduledEMA"]["begun"] == 3


def test_only_the_weights_of_a_sharded_checkpoint_are_read(small_recipe, tmp_path, monkeypatch):
    path, task = a_run(small_recipe(tmp_path / "run", EMA), "composer", sharded=True)
    read = []
    load = Sharded._load
    monkeypatch.setattr(Sharded, "_load", lambda self, info: read.append(info.length) or load(self, info))
    size = sum(file.stat().st_size for file in path.iterdir())
    trained = {name for name, _ in task.named_parameters()}
    known = {
        None: (task.state_dict().keys(), trained, 0.8),  # weights and averages, without the moments
        "raw": (task.state_dict().keys(), set(), 0.4),
        "ema": (task.state_dict().keys() - trained, trained, 0.4),
    }
    for only, (weights, average, share) in known.items():
        read.clear()
        found = read_checkpoint(path, only)
        assert (found.weights.keys(), found.average.keys()) == (weights, average), only
        assert sum(read) < share * size, only


@pytest.mark.slow
def test_what_two_ranks_sharded(two_ranks, tmp_path):
    from tests.recipes.algorithms.sharding.fsdp_ranks import RUNS

    runs = two_ranks(RUNS)
    for run in ("sharded", "full"):
        export(runs / run, tmp_path / run)
        export(runs / run, tmp_path / f"{run}_raw", "--weights", "raw")
        for folder, part in ((run, "transformer_ema"), (f"{run}_raw", "transformer")):
            written = load_file(tmp_path / folder / "transformer" / "diffusion_pytorch_model.safetensors")
            known = load_file(runs / run / "export" / part / "diffusion_pytorch_model.safetensors")
            assert all(torch.equal(written[name], known[name]) for name in known), folder


def test_a_sharded_checkpoint_is_put_together_again(tmp_path, monkeypatch):
    """Nested as it was, with parts of one tensor from several files."""
    values = {"a": {"b": torch.arange(6.0).view(2, 3), "c": [torch.tensor(1.5), {"d": 3}]}, "e": (1, "x")}
    dcp.save(values, checkpoint_id=tmp_path / "whole")
    sharded, listed = Sharded.open(tmp_path / "whole"), []
    files = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: listed.append(folder) or files(folder))
    found = sharded.nested()
    assert len(listed) == 1  # not once per tensor: there is a file of each rank
    assert torch.equal(found["a"]["b"], values["a"]["b"]) and found["a"]["c"][1] == {"d": 3} and found["e"] == (1, "x")
    assert found["a"]["c"][0].shape == () and found["a"]["c"][0] == 1.5
    assert list(sharded.values(lambda name: name == "e")) == ["e"]
    for file in (tmp_path / "whole").glob("*.distcp"):
        file.unlink()
    with pytest.raises(ValueError, match="missing; copy the whole folder"):
        sharded.nested()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("run_by_pickle",)


def test_no_code_of_a_checkpoint_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "ep1-ba1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "ep1-ba1" / ".metadata").write_bytes(pickle.dumps(Evil()))
    torch.save({"state": Evil()}, tmp_path / "checkpoints" / "ep1-ba1.ckpt")
    for name in ("ep1-ba1", "ep1-ba1.ckpt"):
        with pytest.raises(ValueError, match="not (of )?a checkpoint (of a run|that)"):
            read_checkpoint(tmp_path / "checkpoints" / name)
    values = {"state.model.x": Evil(), "state.algorithms": Evil()}
    dcp.save(values, checkpoint_id=tmp_path / "values")
    with pytest.raises(ValueError, match="not readable as a part of a checkpoint"):
        read_checkpoint(tmp_path / "values")
    assert not (tmp_path / "run_by_pickle").exists()


def test_a_full_or_read_only_disk_costs_one_line(exported, tmp_path, capsys):
    source, whole = Path(exported[0].output, "export"), tmp_path / "whole"
    export(source, whole, "--layout", "native")
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    size = sum((whole / file).stat().st_size for file in files)
    with small_disk(tmp_path / "disk", 32) as disk:
        for room in (0, size // 2, size - 4096):
            filler = fill(disk, room)
            error = refuse(capsys, source, disk / "out", "--layout", "native")
            assert error.startswith(f"error: {disk}/out: No space left on device; make room there")
            filler.unlink()
            assert not list(disk.iterdir())
        read_only(disk)
        assert f"{disk}/out: Read-only file system" in refuse(capsys, source, disk / "out", "--layout", "native")
        read_only(disk, False)
        export(source, disk / "out", "--layout", "native")
        assert sorted(file.relative_to(disk / "out") for file in disk.rglob("*") if file.is_file()) == files
        differ = filecmp.cmpfiles(whole, disk / "out", files, shallow=False)[1]
        assert list(map(str, differ)) == ["README.md"]  # its title is the folder's name


def test_the_next_export_removes_what_a_killed_one_has_left(exported, tmp_path, monkeypatch):
    source, out = Path(exported[0].output) / "export", tmp_path / "out"
    child = os.fork()
    if not child:
        monkeypatch.setattr(write, "write_layout", lambda *arguments: os._exit(9))
        write.write_export(source, out)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and len(list(tmp_path.iterdir())) == 1
    write.write_export(source, out, layout="native")
    assert list(tmp_path.iterdir()) == [out] and not [path for path in out.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_exported(small_recipe, tmp_path, clip_folder, capsys, monkeypatch):
    gone = f"data.streams.docs.path={tmp_path}/none"  # the recipe's own set may be there
    language = load_config(ROOT / "yamls" / "docs_gpt2.yaml", [gone], Recipe, [])
    with pytest.raises(FileNotFoundError, match="/vocabulary.json: not there; .* or pack.py; or give a folder"):
        training_data(language, {}, tmp_path / "export", None)
    recipe = small_recipe(tmp_path / "run")
    path, _ = a_run(recipe, average=False)
    out = tmp_path / "out"
    assert "no such checkpoint" in refuse(capsys, tmp_path / "none", out)
    assert "no exported run" in refuse(capsys, tmp_path, out)
    assert "--weights ema" in refuse(capsys, path, out, "--weights", "ema")
    assert "not a checkpoint" in refuse(capsys, tmp_path / "run" / "config.yaml", out)
    # A text encoder that transformers cannot represent, named by where it is, and not by its copy.
    with monkeypatch.context() as patch:
        patch.setattr(diffusers_pipeline, "TOLERANCE", -1.0)
        assert f"text_encoder: {clip_folder} (penultimate layer) as transformers" in refuse(capsys, path, out)
    # A checkpoint of another recipe.
    other = small_recipe(tmp_path / "other", "model.denoiser.blocks=2")
    (tmp_path / "other.yaml").write_text(to_yaml(other))
    assert "ep1-ba5.ckpt does not fit the model" in refuse(capsys, path, out, "--recipe", tmp_path / "other.yaml")
    assert "no such file; give the config" in refuse(capsys, path, out, "--recipe", tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text((tmp_path / "other.yaml").read_text().replace("global_batch", "globalbatch"))
    assert "globalbatch" in refuse(capsys, path, out, "--recipe", tmp_path / "bad.yaml")
    # Something else in its place.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert "exists and is not an export" in refuse(capsys, path, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists() and not out.exists()


def test_where_an_export_is_written(exported, tmp_path, capsys, monkeypatch):
    """Not into what is copied; but where a link points, and where the command is called."""
    source = Path(exported[0].output, "export")
    names = sorted(file.name for file in source.iterdir())
    error = refuse(capsys, source, source / "other", "--layout", "native")
    assert error == f"error: {source}/other: inside of the export {source}; give a folder beside it"
    assert f"{source}: is the export {source}; give a folder beside it" in refuse(capsys, source, source)
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file: File exists; a file has" in refuse(capsys, source, tmp_path / "file" / "out")
    (tmp_path / "file").unlink()
    assert sorted(file.name for file in source.iterdir()) == names
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    export(source, tmp_path / "link", "--layout", "native")
    monkeypatch.chdir(tmp_path / "here")
    export(source, ".", "--layout", "native")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["here", "link"] and (tmp_path / "link").is_symlink()
    assert (tmp_path / "here" / "README.md").read_text().count("here") == 1


def test_data_and_encoders_that_have_gone(small_recipe, tmp_path, latent_sets, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(latent_sets / "train", data)
    recipe = small_recipe(tmp_path / "run", f"data.streams.train.path={data}")
    path, _ = a_run(recipe, average=False)
    manifest = json.loads((data / "manifest.json").read_text())
    encoder = Path(manifest["text_encoder"]["component"]["path"])
    manifest["text_encoder"]["component"]["path"] = str(tmp_path / "gone")
    (data / "manifest.json").write_text(json.dumps(manifest))
    error = refuse(capsys, path, out)
    assert "manifest.text_encoder" in error and "gone" in error
    shutil.copytree(encoder, data / "text_encoder")
    export(path, out, "--data", data)
    # Weights that are not those which encoded the data.
    tensors = load_file(data / "text_encoder" / "open_clip_model.safetensors")
    tensors["ln_final.bias"] += 1
    save_file(tensors, data / "text_encoder" / "open_clip_model.safetensors")
    for layout in ("diffusers", "native"):
        error = refuse(capsys, path, out, "--data", data, "--layout", layout)
        assert f"the weights of {data / 'text_encoder'} (penultimate layer) are not those that encoded the set" in error
    # Without the data, unless the run's own export is there.
    shutil.rmtree(data)
    assert "--data FOLDER" in refuse(capsys, path, tmp_path / "again")
    assert (out / "model_index.json").is_file()  # what was there has stayed


def test_encoders_that_were_trained_again(small_recipe, tmp_path, latent_sets, vae_folder, capsys):
    """The run's own export has copies of those that encoded the set."""
    data, vae, out = tmp_path / "data", tmp_path / "vae", tmp_path / "out"
    shutil.copytree(latent_sets / "train", data)
    shutil.copytree(vae_folder, vae)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["image_encoder"]["component"]["path"] = str(vae)
    (data / "manifest.json").write_text(json.dumps(manifest))
    recipe = small_recipe(tmp_path / "run", f"data.streams.train.path={data}")
    path, task = a_run(recipe, average=False)
    loading, _ = training_data(recipe, task.requirements(), tmp_path / "run" / "export", None)
    write_export(task, loading, tmp_path / "run" / "export", {"run_name": "run", "batches": 5}, complete=True)
    file = vae / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_out.bias"] += 1
    save_file(tensors, file)
    export(path, out, "--layout", "native")
    assert (out / "image_encoder" / file.name).read_bytes() == (vae_folder / file.name).read_bytes()
    assert f"the weights of {vae} are not those that encoded the set" in refuse(capsys, path, out, "--data", data)


def test_a_set_that_was_encoded_again_in_place(small_recipe, tmp_path, latent_sets, capsys):
    """The manifest there is not the one of what the run was trained on."""
    path, _ = a_run(small_recipe(tmp_path / "run"), average=False)
    record = tmp_path / "run" / "records" / "ep1-ba5" / "encoded.json"
    record.parent.mkdir(parents=True)
    own = Manifest.read(latent_sets / "train").encoders()
    record.write_text(json.dumps(own | {"samples": 40}))
    export(path, tmp_path / "out", "--layout", "native")
    record.write_text(json.dumps(own | {"samples": 40, "image_weights": "then"}))
    error = refuse(capsys, path, tmp_path / "out")
    assert f"data: not encoded as that of {tmp_path}/run: " in error and "--data FOLDER" in error
    assert "image_weights is" in error and "the recipe expects then" in error


@pytest.mark.parametrize(("sets", "images"), [(["train"], 40), (["train", "more"], None)])
def test_data_given_instead_of_a_store_whose_account_is_not_set_here(
    small_recipe, tmp_path, latent_sets, monkeypatch, sets, images
):
    monkeypatch.delenv("AZURE_ACCOUNT_NAME", raising=False)
    streams = (f"{label}: {{name: remote, url: azure-dl://sets/{label}, cache: {tmp_path}/{label}}}" for label in sets)
    recipe = small_recipe(tmp_path / "run", "data.streams=null", f"data.streams={{{', '.join(streams)}}}")
    loading, bundle = training_data(recipe, {}, tmp_path / "run" / "export", latent_sets / "train")
    assert bundle == latent_sets / "train" and loading.manifest.samples == 40
    assert loading.images == images


def test_a_store_that_cannot_be_reached(small_recipe, tmp_path, latent_sets, capsys):
    """The run's own export has what the remote set would say."""
    recipe = small_recipe(tmp_path / "run")
    stream = f"{{name: remote, url: {tmp_path}/nowhere, cache: {tmp_path}/cache}}"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(to_yaml(recipe))
    recipe = load_config(tmp_path / "run" / "recipe.yaml", [f"data.streams={{train: {stream}}}"], Recipe, missing=[])
    path, _ = a_run(recipe, average=False)
    assert "--data FOLDER" in refuse(capsys, path, tmp_path / "out")
    own = tmp_path / "run" / "export"
    shutil.copytree(latent_sets / "train", own)
    manifest = json.loads((own / "manifest.json").read_text())
    encoder = manifest["text_encoder"]["component"]
    shutil.copytree(encoder["path"], own / "text_encoder")
    (own / "manifest.json").write_text(json.dumps(manifest).replace(encoder["path"], "gone"))
    export(path, tmp_path / "out")
    assert (tmp_path / "out" / "model_index.json").is_file()
