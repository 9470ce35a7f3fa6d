"""Captions to a PNG from an export: the same pictures wherever it lies, and nothing that would have to be unpickled."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from recipes.export import main as convert
from recipes.generate import main, parse, read_captions
from recipes.generation.exports import families, find_export, load_pipeline
from tests.recipes.errors import last_error

CAPTIONS = ["a red dot", "a blue star", "a red dot"]


@pytest.fixture(scope="module")
def export(exported):
    return Path(exported[0].output, "export")


@pytest.fixture(scope="module")
def pipeline(export):
    return load_pipeline(export, "cpu", "fp32")


def refuse(arguments, capsys):
    return last_error(main, arguments, capsys)


def command(checkpoint, out, *more):
    return [checkpoint, "--prompts", *CAPTIONS, "--out", out, "--steps", "3", "--device", "cpu", *more]


def make(tmp_path, checkpoint, *more, name="grid.png"):
    main([str(argument) for argument in command(checkpoint, tmp_path / name, *more)])
    with Image.open(tmp_path / name) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def test_a_grid(tmp_path, export, capsys, monkeypatch):
    grid = make(tmp_path, export, "--columns", "3")
    assert grid.shape == (128 + 19 + 12, 3 * (128 + 6) + 6, 3)
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/grid.png\n" and "3/3 images" in said.err
    # The run's folder is as good as its export, and captions may come from a file.
    assert (make(tmp_path, export.parent, "--columns", "3") == grid).all()
    (tmp_path / "captions.txt").write_text("\n".join([CAPTIONS[0], "", *CAPTIONS[1:], " "]), encoding="utf-8-sig")
    monkeypatch.setenv("HOME", str(tmp_path))  # shells leave the ~ after a = to the program
    arguments = [export, "--prompts-file=~/captions.txt", "--out=~/file.png"]
    main([str(a) for a in [*arguments, "--steps", "3", "--columns", "3", "--device", "cpu"]])
    assert (np.asarray(Image.open(tmp_path / "file.png")) == grid).all()


def test_only_line_feeds_end_a_caption_of_a_file(tmp_path):
    """With a carriage return before them or without. Other separators of Unicode occur in captions from the web."""
    file = tmp_path / "captions.txt"
    file.write_bytes("a red\u2028dot\r\n\r\na\x0cblue\x85star\nlast".encode("utf-8-sig"))
    options = parse(["export", "--prompts-file", str(file)])
    assert read_captions(options) == ["a red\u2028dot", "a\x0cblue\x85star", "last"]


def test_a_caption_of_other_bytes_is_refused(capsys):
    """Python makes lone surrogates of the bytes of arguments that are not UTF-8. No vocabulary takes them."""
    with pytest.raises(SystemExit) as ended:
        read_captions(parse(["export", "--prompts", "red heart", b"caf\xe9".decode("utf-8", "surrogateescape")]))
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and r"error: --prompts: 'caf\udce9' is not UTF-8 text" in said[0]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_processes_are_told_that_each_does_all(rank, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit):
        main(["nowhere", "--prompts", "red heart"])
    said = "generate: each of 2 processes (WORLD_SIZE) does all of the work; start one, without a launcher"
    assert capsys.readouterr().err.splitlines()[:-1] == ([said] if rank == "0" else [])


def test_several_pictures_a_caption(tmp_path, export):
    assert make(tmp_path, export, "--each", "2", "--columns", "6").shape[1] == 6 * (128 + 6) + 6


def test_the_export_can_be_moved(tmp_path, export, exported):
    """Encoders travel with it: the places that they were read from may be gone."""
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(export, moved)
    values = json.loads((moved / "manifest.json").read_text())
    for group in ("image_encoder", "text_encoder"):
        values[group]["component"]["path"] = str(tmp_path / "gone")
    (moved / "manifest.json").write_text(json.dumps(values))
    assert (make(tmp_path, moved) == make(tmp_path, export)).all()


def test_the_last_sample_grid_can_be_made_again(tmp_path, export, exported):
    """Training's own grid and generate.py agree: one null caption, one scaling, the same weights."""
    prompts = ["--prompts", "a dot", "a star", "a wall", "--guidance", "5", "--steps", "3", "--device", "cpu"]
    main([str(export), *prompts, "--out", str(tmp_path / "grid.png")])
    drawn = Image.open(Path(exported[0].output, "samples", "ba0000014.png"))
    assert np.abs(np.asarray(drawn).astype(int) - np.asarray(Image.open(tmp_path / "grid.png"))).max() <= 1


@pytest.mark.parametrize("sampler", ["ddim", "dpm++"])
def test_pictures_depend_on_caption_and_seed_alone(pipeline, sampler):
    options = {"sampler": sampler, "steps": 4, "guidance": 4.0}
    together = pipeline.generate(CAPTIONS, seeds=[5, 6, 7], batch=3, **options)
    assert together.shape == (3, 16, 16, 3) and together.dtype == np.uint8
    state = torch.get_rng_state()
    apart = pipeline.generate(CAPTIONS, seeds=[5, 6, 7], batch=1, **options)
    assert (torch.get_rng_state() == state).all()
    # Other batch sizes add in another order, which may round one level up or down.
    assert np.abs(together.astype(int) - apart).max() <= 1
    backwards = pipeline.generate(CAPTIONS[::-1], seeds=[7, 6, 5], batch=3, **options)
    assert np.abs(together.astype(int) - backwards[::-1]).max() <= 1
    assert (together[0] != together[2]).any()  # the same caption, another seed
    other = pipeline.generate(["a blue star"], seeds=[5], batch=1, **options)
    assert (other[0] != apart[0]).any()  # the same seed, another caption


def test_guidance_moves_pictures(pipeline):
    def made(guidance):
        return pipeline.generate(CAPTIONS[:1], seeds=[1], steps=3, guidance=guidance).astype(int)

    assert np.abs(made(1.0) - made(8.0)).max() > 1


def test_another_resolution(pipeline):
    assert pipeline.generate(["x"], seeds=[0], steps=1, resolution=32).shape == (1, 32, 32, 3)
    with pytest.raises(ValueError, match="--resolution: 22 is not a positive multiple of 4"):
        pipeline.generate(["x"], seeds=[0], steps=1, resolution=22)


def test_half_precision(tmp_path, export):
    full, half = make(tmp_path, export), make(tmp_path, export, "--precision", "bf16", name="half.png")
    assert full.shape == half.shape and 0 < np.abs(full.astype(int) - half).mean() < 8


def test_pictures_that_overflow_are_refused(tmp_path, export, capsys):
    """They would be black, and their scores those of black pictures."""
    shutil.copytree(export, tmp_path / "export")
    (weights,) = (tmp_path / "export" / "unet").glob("*.safetensors")
    save_file({name: 1000 * tensor for name, tensor in load_file(weights).items()}, weights)
    command_line = command(tmp_path / "export", tmp_path / "grid.png", "--precision", "fp16")
    assert "3 of 3 images are not finite in fp16; use precision fp32, " in refuse(command_line, capsys)
    assert not (tmp_path / "grid.png").exists()


def test_checkpoints_are_not_unpickled(tmp_path, exported, capsys):
    checkpoint = Path(exported[0].output, "checkpoints", "ep2-ba14-rank0.pt")
    error = refuse(command(checkpoint, tmp_path / "x.png"), capsys)
    assert "can run code when it is read" in error and f"give {exported[0].output}/export" in error
    # Nor is a pickle taken that somebody put into an export in place of its safetensors.
    (tmp_path / "export").mkdir()
    shutil.copytree(exported[0].output + "/export", tmp_path / "export", dirs_exist_ok=True)
    weights = tmp_path / "export" / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises((SystemExit, OSError)):
        main([str(argument) for argument in command(tmp_path / "export", tmp_path / "x.png")])
    assert not (tmp_path / "x.png").exists()


def test_of_a_run_without_an_export_the_command_that_makes_one_is_named(tmp_path, capsys):
    """The message named an export that was not there, and the next one the same again."""
    checkpoint = tmp_path / "a run" / "checkpoints" / "ep0-ba3-rank0.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    made = "the FOLDER that `python recipes/export.py {} FOLDER --layout native` makes"
    assert f"give {made}".format(f"'{checkpoint}'") in refuse(command(checkpoint, tmp_path / "x.png"), capsys)
    assert f"or {made}".format("CHECKPOINT") in refuse(command(tmp_path / "a run", tmp_path / "x.png"), capsys)
    (tmp_path / "a run" / "export").mkdir()
    said = refuse(command(checkpoint, tmp_path / "x.png"), capsys)
    assert f"give {tmp_path}/a run/export, which the export callback wrote" in said


def test_what_is_not_there(tmp_path, export, capsys):
    said = refuse(command(tmp_path, tmp_path / "x.png"), capsys)
    assert "no exported run of a token model or diffusion model" in said
    assert "no exported run" in refuse(command(tmp_path / "none", tmp_path / "x.png"), capsys)
    assert "give captions: --prompts" in refuse([export], capsys)
    assert "none.txt" in refuse([export, "--prompts-file", tmp_path / "none.txt"], capsys)
    said = refuse([export, "--prompts-file", tmp_path], capsys)
    assert f"{tmp_path}: Is a directory; a folder has the name of a file: give a file" in said
    (tmp_path / "latin.txt").write_text("caf\u00e9", encoding="latin-1")
    assert "is not UTF-8 text" in refuse([export, "--prompts-file", tmp_path / "latin.txt"], capsys)


def test_options_that_cannot_be(tmp_path, export, capsys, monkeypatch):
    assert f"--out: {tmp_path} is a folder" in refuse(command(export, tmp_path), capsys)
    assert "x.jpg: the file is a PNG; give a name" in refuse(command(export, tmp_path / "x.jpg"), capsys)
    (tmp_path / "file").touch()
    assert f"x.png is below {tmp_path}/file, which is" in refuse(command(export, tmp_path / "file" / "x.png"), capsys)
    assert "File name too long; give another name" in refuse(command(export, tmp_path / ("x" * 300)), capsys)
    for columns in ("0", "99999999999999999999"):
        said = refuse(command(export, tmp_path / "x.png", "--columns", columns), capsys)
        assert f"--columns: {columns}; give 1 to 1000" in said
    assert "must be at least 1" in refuse(command(export, tmp_path / "x.png", "--batch", "0"), capsys)
    assert "must be at least 1" in refuse(command(export, tmp_path / "x.png", "--steps", "0"), capsys)
    for resolution in ("22", "0", "-4"):
        said = refuse(command(export, tmp_path / "x.png", "--resolution", resolution), capsys)
        assert f"{resolution} is not a positive multiple of 4" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in refuse(command(export, tmp_path / "x.png", "--device", "gpu"), capsys)


@pytest.mark.parametrize("group", ["image_encoder", "text_encoder"])
def test_encoders_whose_weights_changed(tmp_path, export, capsys, group):
    shutil.copytree(export, tmp_path / "export")
    (file,) = (tmp_path / "export" / group).glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, file)
    error = refuse(command(tmp_path / "export", tmp_path / "x.png"), capsys)
    assert f"manifest.{group}: the weights of" in error and "are not those that encoded the set" in error
    assert not (tmp_path / "x.png").exists()


def test_an_export_without_a_part(tmp_path, export, capsys):
    for part in ("null_text.npy", "manifest.json", "export.json"):
        shutil.copytree(export, tmp_path / part / "export")
        (tmp_path / part / "export" / part).unlink()
        assert part in refuse(command(tmp_path / part, tmp_path / "x.png"), capsys)
    folder = tmp_path / "export.json" / "export"
    (folder / "unet").rename(folder / "transformer")  # as of a diffusion transformer
    assert "export.json: no such file" in refuse([*command(folder, tmp_path / "x.png"), "--steps", 2], capsys)


def test_an_export_whose_null_caption_has_another_shape(tmp_path, export, capsys):
    shutil.copytree(export, tmp_path / "export")
    np.save(tmp_path / "export" / "null_text.npy", np.zeros((3, 3), np.float16))
    assert "null_text.npy: not readable" in refuse(command(tmp_path / "export", tmp_path / "x.png"), capsys)


def test_where_the_export_is_looked_for(tmp_path, export):
    assert find_export(export) == find_export(export.parent) == export
    with pytest.raises(ValueError, match="is a file"):
        find_export(export / "export.json")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="a pipeline of diffusers, which opens it; give the folder of the run"):
        find_export(tmp_path)
    network = tmp_path / "language" / "transformer"  # an export of `language`
    network.mkdir(parents=True)
    (network / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="language: no exported run of a token model or diffusion model"):
        find_export(network.parent)
    (network.parent / "export.json").write_text("{}")
    with pytest.raises(ValueError, match="language: its model generates no images .* of a token model or diffusion"):
        find_export(network.parent)


def test_a_seed_that_generators_do_not_take_is_refused(export, capsys):
    assert refuse([export, "--seed", 10**19], capsys) == f"error: --seed: {10**19}; give a number below 2^62"


def test_exports_of_before_their_record_named_the_family(tmp_path, export):
    shutil.copytree(export, tmp_path / "export")
    file = tmp_path / "export" / "export.json"
    record = json.loads(file.read_text())
    assert record["family"] == "latent_diffusion" and record["denoiser"] == "unet" and record["objective"] == "ddpm"
    for key in ("family", "network", "denoiser", "objective"):
        del record[key]
    file.write_text(json.dumps(record))
    assert (make(tmp_path, tmp_path / "export") == make(tmp_path, export, name="new.png")).all()
    convert([str(tmp_path / "export"), str(tmp_path / "converted")])
    assert (tmp_path / "converted" / "model_index.json").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "os"}, "unknown family 'os'; this version knows autoregressive, latent_diffusion"),
        ({"network": "../unet"}, "network '../unet' is not the name of a folder"),
        ({"network": ".."}, "network '..' is not the name of a folder"),
        ({"network": None}, "network None is not the name of a folder"),
        ({"objective": "os"}, "unknown objective 'os'; this version knows ddpm"),
        ({"denoiser": "os"}, "unknown denoiser 'os'; this version knows unet, dit"),
        ({"denoiser": "mine.net"}, "unknown denoiser 'mine.net'; no package 'mine' that has it is installed; this ver"),
        ({"denoiser": ["unet"]}, "unknown denoiser ['unet']; this version knows unet, dit"),
        ({"resolution": "16"}, "export.json: resolution is '16', not a whole number of 1 or more"),
        ({"resolution": 0}, "export.json: resolution is 0, not a whole number of 1 or more"),
    ],
)
def test_a_record_names_only_what_there_is(tmp_path, export, capsys, changes, message):
    shutil.copytree(export, tmp_path / "export")
    file = tmp_path / "export" / "export.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert message in refuse(command(tmp_path / "export", tmp_path / "x.png"), capsys)


def test_a_record_without_an_entry(tmp_path, export, capsys):
    shutil.copytree(export, tmp_path / "export")
    file = tmp_path / "export" / "export.json"
    record = json.loads(file.read_text())
    del record["resolution"]
    file.write_text(json.dumps(record))
    said = refuse(command(tmp_path / "export", tmp_path / "x.png"), capsys)
    assert "export.json: 'resolution' is missing; export the run again" in said


def test_options_of_another_family_or_objective(tmp_path, export, capsys):
    said = refuse(command(export, tmp_path / "x.png", "--top-k", "3"), capsys)
    assert "--top-k: an option of token models; this export holds a diffusion model" in said
    said = refuse(command(export, tmp_path / "x.png", "--sampler", "euler"), capsys)
    assert "sampler: `euler` is unknown to ddpm" in said


def test_every_family_declares_itself():
    assert list(families()) == ["autoregressive", "latent_diffusion"]
    for family in families().values():
        assert all("default" not in settings for settings in family.options.values())


def test_what_a_long_caption_loses(tmp_path, export, capsys):
    """The encoder takes 12 tokens, of which two mark the ends: one line says how many are lost, none if none are."""
    make(tmp_path, export)
    assert "too long" not in capsys.readouterr().err
    long = ["dot " * 10, "red " * 13, "blue " * 11]
    main([str(a) for a in [export, "--prompts", *long, "--out", tmp_path / "x.png", "--steps", "1", "--device", "cpu"]])
    said = [line for line in capsys.readouterr().err.splitlines() if "too long" in line]
    shown = "red red red red red red red red red red ..."
    assert said == [
        f"generate: 2 captions are too long for the model: the last 3 tokens are cut from {shown!r}"
    ]
