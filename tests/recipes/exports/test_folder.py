"""The folder of an export has what generation from it needs, the encoders and the vocabulary, and nothing else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.encoded.manifest import Manifest
from data.loading import Loading
from data.tokenizers.bpe import Vocabulary
from data.tokenizers.vocabulary_files import VocabularyFile
from recipes.config.build import encoder_components, encoders_of
from recipes.exports.encoder_files import encoder_files
from recipes.exports.folder import export
from recipes.models.task import Task


class Small(Task):
    """Has one file of weights."""

    def export(self, folder):
        (folder / "weights").touch()


@pytest.fixture
def task():
    return Small()


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ({"subfolder": "text_encoder", "tokenizer": "tokenizer"}, ["text_encoder", "tokenizer"]),
        ({"subfolder": "text_encoder"}, ["text_encoder"]),
        ({"tokenizer": "tokenizer"}, ["text_encoder", "tokenizer", "unet", "vae"]),
        ({"subfolder": "../text_encoder"}, ["text_encoder", "tokenizer", "unet", "vae"]),
    ],
)
def test_of_a_pipeline_an_export_has_what_its_encoders_read(tmp_path, task, text, copied):
    pipeline = tmp_path / "pipeline"
    for name in ("text_encoder", "tokenizer", "unet", "vae"):
        (pipeline / name).mkdir(parents=True)
        (pipeline / name / "config.json").write_text("{}")
        (pipeline / name / "model.safetensors").touch()
    image = {"component": {"path": str(pipeline), "subfolder": "vae"}}
    parts = {"image_encoder": image, "text_encoder": {"component": {"path": str(pipeline), **text}}}
    manifest = SimpleNamespace(**parts, write=lambda folder: None)
    export(task, Loading(loader=None, manifest=manifest, resolution=32), tmp_path / "export", {}, complete=True)
    found = {name: sorted(path.name for path in (tmp_path / "export" / name).iterdir()) for name in parts}
    assert found == {"image_encoder": ["vae"], "text_encoder": copied}


def test_an_export_has_the_weights_of_open_clip_that_are_one_file(tmp_path, task):
    weights = tmp_path / "weights.safetensors"
    weights.write_text("weights")
    component = {"name": "open_clip_text", "model": "ViT-H-14", "pretrained": str(weights)}
    record = {"component": component, "weights_hash": ""}
    manifest = SimpleNamespace(image_encoder=None, text_encoder=record, write=lambda folder: None)
    folder = tmp_path / "export"
    export(task, Loading(loader=None, manifest=manifest, resolution=32), folder, {}, complete=True)
    weights.unlink()  # the export was moved to another machine
    found = encoder_components(manifest, folder)["text_encoder"].args
    assert found == {"model": "ViT-H-14", "pretrained": str(folder / "text_encoder" / "weights.safetensors")}
    assert Path(found["pretrained"]).read_text() == "weights"


def test_an_export_copies_no_folder_that_is_no_encoder(tmp_path, task, caplog):
    """The manifest of a set of somebody else may name any, and an export is passed on."""
    for name in ("secrets", "vae"):
        (tmp_path / name / ".git").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "vae" / "w.safetensors").touch()
    parts = {
        "image_encoder": {"component": {"path": str(tmp_path / "vae")}},
        "text_encoder": {"component": {"path": str(tmp_path / "secrets")}},
    }
    manifest = SimpleNamespace(**parts, write=lambda folder: None)
    export(task, Loading(loader=None, manifest=manifest, resolution=32), tmp_path / "export", {}, complete=True)
    assert sorted(p.name for p in (tmp_path / "export" / "image_encoder").iterdir()) == ["config.json", "w.safetensors"]
    assert not (tmp_path / "export" / "text_encoder").exists()
    assert f"{tmp_path}/secrets, which the data's manifest names as text_encoder, holds no weights" in caplog.text
    named = {"component": {"pretrained": str(tmp_path / "vae" / "config.json")}}
    assert not list(encoder_files(SimpleNamespace(image_encoder=None, text_encoder=named)))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"path": "runs/vae/export"}, "runs/vae/export"),
        ({"pretrained": "weights.safetensors"}, "weights.safetensors"),
        ({"path": "somebody/vae"}, None),  # of a hub
        ({"model": "ViT-H-14", "pretrained": "laion2b_s32b_b79k"}, None),
    ],
)
def test_an_export_says_which_encoder_it_lacks(values, named, tmp_path, monkeypatch, caplog):
    """Such as that of a set which was encoded by somebody else, in another folder."""
    monkeypatch.chdir(tmp_path)
    assert not list(encoder_files(SimpleNamespace(image_encoder={"component": values}, text_encoder=None)))
    line = f"export: {named}, which the data's manifest names as image_encoder, is not there (looked in {tmp_path});"
    assert (line in caplog.text) if named else not caplog.text


def test_encoders_in_deep_and_in_linked_folders(tmp_path):
    """Several models in one folder, a cache of the hub, and a tokenizer that several models share."""
    models, vae, words = tmp_path / "models", Path("of/somebody/vae"), tmp_path / "words"
    for folder, files in (
        (models / vae, ["config.json", "diffusion_pytorch_model.safetensors"]),
        (models / "text", ["config.json", "model.safetensors"]),
        (words, ["vocab.json", "merges.txt"]),
    ):
        folder.mkdir(parents=True)
        for file in files:
            (tmp_path / f"blob-{file}").write_text("{}")
            (folder / file).symlink_to(tmp_path / f"blob-{file}")
    (models / "text" / "tokenizer").symlink_to(words)
    image = {"name": "kl_vae", "path": str(models), "subfolder": str(vae)}
    text = {"name": "hf_clip_text", "path": str(models / "text"), "tokenizer": "tokenizer"}
    manifest = SimpleNamespace(image_encoder={"component": image}, text_encoder={"component": text})
    assert sorted(str(place) for _, place in encoder_files(manifest)) == [
        "image_encoder/of/somebody/vae/config.json",
        "image_encoder/of/somebody/vae/diffusion_pytorch_model.safetensors",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "text_encoder/tokenizer/merges.txt",
        "text_encoder/tokenizer/vocab.json",
    ]


def test_no_hidden_folder_is_an_encoder(tmp_path):
    """Somebody else's manifest may name one as a part of a folder of weights."""
    (tmp_path / ".secret").mkdir()
    for file in ("w.safetensors", ".secret/w.safetensors", ".secret/key"):
        (tmp_path / file).touch()
    component = {"name": "dvae", "path": str(tmp_path), "subfolder": ".secret"}
    assert not list(encoder_files(SimpleNamespace(image_encoder={"component": component}, text_encoder=None)))


def test_an_export_of_token_data_has_its_vocabulary_and_dvae(tmp_path, task, token_sets):
    """The vocabulary is that of its training, whichever is in the same place when the run ends."""
    for name in ("vocabulary.json", "vocabulary.manifest.json"):
        shutil.copy(token_sets / name, tmp_path)
    vocabulary = VocabularyFile.read(tmp_path / "vocabulary.json")
    for name in ("vocabulary.json", "vocabulary.manifest.json"):
        (tmp_path / name).write_text("of another training")
    manifest = Manifest.read(token_sets / "train")
    loading = Loading(loader=None, images=7, manifest=manifest, resolution=32, vocabulary=vocabulary)
    folder = tmp_path / "export"
    export(task, loading, folder, {}, complete=True)
    assert Vocabulary.read(folder / "vocabulary.json").size == 280
    assert (folder / "vocabulary.manifest.json").is_file() and not (folder / "null_text.npy").exists()
    images, texts = encoders_of(Manifest.read(folder), folder)
    assert images.codes == 32 and images.id == str(folder / "image_encoder") and texts is None
    assert json.loads((folder / "export.json").read_text()) == {"resolution": 32, "images": 7}


def test_encoders_that_were_trained_again_do_not_replace_the_copies(tmp_path, task, dvae_folder, token_sets):
    """Nobody would have those any more that encoded the set, and no image could be drawn."""
    encoder, folder = tmp_path / "dvae", tmp_path / "export"
    shutil.copytree(dvae_folder, encoder)
    manifest = Manifest.read(token_sets / "train")
    component = {**manifest.image_encoder["component"], "path": str(encoder)}
    manifest = replace(manifest, image_encoder={**manifest.image_encoder, "component": component})
    loading = Loading(loader=None, manifest=manifest, resolution=32)
    export(task, loading, folder, {}, complete=False)
    before = {file.name: file.read_bytes() for file in (folder / "image_encoder").iterdir()}
    for file in encoder.iterdir():
        file.write_text("of another training")
    export(task, loading, folder, {}, complete=True)
    assert {file.name: file.read_bytes() for file in (folder / "image_encoder").iterdir()} == before
    # An export of an earlier run, whose set other weights encoded, is no source of copies.
    other = replace(manifest, image_encoder={**manifest.image_encoder, "weights_hash": "0"})
    export(task, replace(loading, manifest=other), folder, {}, complete=True)
    assert (folder / "image_encoder" / "config.json").read_text() == "of another training"
