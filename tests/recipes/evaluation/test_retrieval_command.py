"""Retrieval accuracy: ranks against a plain loop, and the command on a small export."""

import io
import json
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from recipes.evaluate import main
from recipes.evaluation import retrieval_command
from recipes.evaluation.retrieval import accuracy, ranks, read_pairs
from recipes.generation.exports import find_network, weights_of


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_ranks_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    images, captions = unit(rng.normal(size=(20, 4))), unit(rng.normal(size=(9, 4)))
    own = rng.integers(9, size=20)
    for image, index, rank in zip(images, own, ranks(images, captions, own), strict=True):
        better = [caption for caption in captions if caption @ image > captions[index] @ image + 1e-9]
        assert len(better) + 1 == rank


def test_a_model_that_sees_nothing_finds_nothing():
    same = unit(np.ones((6, 3)))
    found = ranks(same, same, np.arange(6))
    assert accuracy(found) == {"images": 6, "top1": 0.0, "top5": 0.0, "median_rank": 6.0}


def test_shares_are_of_ranks():
    assert accuracy(np.array([1, 1, 4, 5, 6])) == {"images": 5, "top1": 0.4, "top5": 0.8, "median_rank": 4.0}


class Pairs:
    """A source of images whose caption is their colour."""

    def shards(self):
        return ["a"]

    def read(self, shard):
        from PIL import Image

        from data.sources.base import Rejected, Sample

        for level in range(6):
            yield Sample(str(level), Image.new("RGB", (10, 8), (level, 0, 0)), f" red {level}\n")
        yield Rejected("x", "missing_image")


def test_pairs_stay_together():
    captions, images, everything = read_pairs(Pairs(), 4, 3, 5)
    assert len(captions) == len(set(captions)) == 4 and images.shape == (4, 5, 5, 3)
    assert [f"red {image[0, 0, 0]}" for image in images] == captions
    assert everything == [f"red {level}" for level in range(6)]
    assert read_pairs(Pairs(), 4, 3, 5)[0] == captions != read_pairs(Pairs(), 4, 4, 5)[0]
    assert len(read_pairs(Pairs(), None, 0, 5)[0]) == 6
    with pytest.raises(ValueError, match="--number: 7 images wanted, 6 found"):
        read_pairs(Pairs(), 7, 0, 5)


@pytest.mark.parametrize(
    ("networks", "record", "chosen"),
    [
        (["unet", "unet_ema"], {}, "averaged"),
        (["unet"], {}, "as trained"),
        (["unet"], {"weights": "as trained"}, "as trained"),
        (["unet"], {"weights": "averaged"}, "averaged"),  # as recipes/export.py writes it
    ],
)
def test_which_weights_are_evaluated(tmp_path, networks, record, chosen):
    for name in networks:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "export.json").write_text(json.dumps({"family": "latent_diffusion", "network": "unet", **record}))
    assert weights_of(tmp_path, find_network(tmp_path, None)) == chosen
    (tmp_path / networks[-1] / "config.json").unlink()  # the folder was copied in part: the weights stay the same ones
    assert weights_of(tmp_path, find_network(tmp_path, None)) == chosen


def test_the_command(exported, drawings, clip_folder, tmp_path, capsys):
    export, tars = Path(exported[0].output, "export"), sorted(Path(drawings).rglob("*.tar"))
    assert tars
    out = tmp_path / "scores.json"
    sets = ["--sets", f"seen={tars[0]}", f"other={tars[-1]}"]
    command = [str(export), "--retrieval", str(clip_folder), *sets, "--number", "3", "--steps", "2", "--device", "cpu"]
    main([*command, "--out", str(out)])
    shown = capsys.readouterr().out
    assert shown.count("\n") == 8 and "| other | generated | 3 |" in shown
    first = json.loads(out.read_text())
    assert set(first["sets"]) == {"seen", "other"}
    assert set(first["sets"]["seen"]) == {"generated", "reconstructed", "real"}
    assert len(first["judge"]["weights_hash"]) == 64 and first["options"] == {"steps": 2}
    assert first["weights"] == "unet, as trained"
    assert first["candidates"] == {"per caption": 1, "chosen by": None}
    main([*command, "--out", str(out), "--batch", "2"])
    assert json.loads(out.read_text()) == first  # whatever the batch
    other = tmp_path / "other"  # the same model with other weights chooses
    shutil.copytree(clip_folder, other)
    weights = load_file(other / "open_clip_model.safetensors")
    save_file({name: weight.flip(0) for name, weight in weights.items()}, other / "open_clip_model.safetensors")
    main([*command, "--out", str(out), "--candidates", "3", "--rerank", str(other)])
    best = json.loads(out.read_text())
    assert best["candidates"] == {"per caption": 3, "chosen by": str(other)}
    seen = best["sets"]["seen"]
    assert seen["generated"]["images"] == 3 and seen["real"] == first["sets"]["seen"]["real"]
    alike = tmp_path / "alike.tar"
    with tarfile.open(tars[0]) as source, tarfile.open(alike, "w") as tar:
        for member in source:
            data = b"red" if member.name.endswith(".txt") else source.extractfile(member).read()
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    for wrong, message in (
        (["--sets", "seen"], "--sets: seen; give NAME=TARS"),
        (["--number", "0"], "--number: 0; give 1 or more"),
        (["--seed", "-1"], "--seed: -1; give 0 or more"),
        (["--out", str(tmp_path)], f"--out: {tmp_path} is a folder"),
        (["--retrieval", str(tmp_path / "none")], "--retrieval: no file"),
        (["--candidates", "2"], "--candidates: give the model that says which are best"),
        (["--candidates", "2", "--rerank", str(clip_folder)], "is the model that judges"),
        (["--temperature", "0.5"], "--temperature: an option of "),
        (["--sets", f"alike={alike}"], "--sets: all images have the caption 'red', which each would find"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*command, *wrong])
        assert end.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["yamls/openmoji_evaluate.yaml", str(export)])
    assert "give the export before the YAML yamls/openmoji_evaluate.yaml" in capsys.readouterr().err


def test_the_name_of_a_set_does_not_command_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(retrieval_command, "read_arguments", lambda *_: SimpleNamespace(out=None))
    monkeypatch.setattr(retrieval_command, "evaluate", lambda options: None)
    monkeypatch.setattr(retrieval_command, "table", lambda result: "| \x1b[2J |")
    monkeypatch.setenv("WORLD_SIZE", "2")
    main(["--retrieval"])
    said = capsys.readouterr()
    assert said.out == "| \\x1b[2J |\n"
    assert said.err.startswith("evaluate --retrieval: each of 2 processes (WORLD_SIZE) does all of the work; start one")
