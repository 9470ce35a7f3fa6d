"""The command line: one line per error, and nothing heavy imported before the config is known to be right."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from streaming.base.compression import get_compressions
from streaming.base.hashing import get_hashes
from streaming.base.storage.download import DOWNLOADER_MAPPINGS
from streaming.base.storage.upload import UPLOADERS

from data.system.files import write_json
from data.system.ranks import Rank
from precompute.config import COMPRESSIONS, HASHES, UPLOADED, EncodeConfig, VocabularyConfig
from precompute.dry_run import USUAL_TEXT, encode_report, image_shape, pack_report, text_shape
from precompute.encode import main as encode
from precompute.encoding.columns import LatentColumns
from precompute.pack import main as pack
from precompute.texts.pack_config import PackConfig
from recipes.config.recipe import Recipe, load_config
from recipes.config.values import Component
from recipes.evaluation.config import Evaluation

ROOT = Path(__file__).resolve().parents[2]
# Runs the script as a program and prints, as the last line, whether torch was imported when it ended.
PROBE = """
import atexit, runpy, sys
atexit.register(lambda: print("torch" if "torch" in sys.modules else "light"))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROBE, str(ROOT / "precompute" / "encode.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "light", done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_help(tmp_path):
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "image_encoder" in done.stdout and "resolutions (list[int]; required)" in done.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("image_encoder.precison=fp16", "precison: unknown key of image_encoder `kl_vae`; did you mean `precision`?"),
        (
            "filter={name: pictures, boilerplate: [a, '(b']}",
            "filter.boilerplate.1: '(b' is no regular expression of RE2",
        ),
        ("resolutions=[64,64]", "resolutions: [64, 64] names one twice"),
        ("sources.train.urls=missing/{00..02}.tar", "no file missing/00.tar"),
        ("image_encoder.path=./missing/vae", "image_encoder.path: `./missing/vae` does not exist"),
    ],
)
def test_errors_are_one_line(override, message, recipe, tmp_path):
    done = run(recipe(), override, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filter": {"name": "pictures", "min_side": 0}}, "filter.min_side is 0: give 1 or more"),
        ({"resolutions": [16, 17]}, "resolutions: 17 is not a multiple of 2, as /"),
        (
            {"resolutions": [20], "image_encoder": {"name": "dvae", "path": "a/b"}, "text_encoder": None},
            "resolutions: 20 is not a multiple of 8, as a/b requires",
        ),
        (
            {"sources": {"train": {"name": "texts", "files": [__file__], "shard_mb": 0}}},
            "sources.train.shard_mb is 0: give 1 or more",
        ),
    ],
)
def test_a_dry_run_checks_what_needs_no_encoder(recipe, changes, message):
    """As the job does, before it reads anything."""
    config = load_config(recipe(**changes), [], EncodeConfig, missing=[])
    with pytest.raises(ValueError, match=message):
        encode_report(config, [], Rank.from_environment())


def test_a_dry_run_reads_the_vocabulary_with_which_texts_are_packed(tmp_path):
    sources = {"docs": Component("source", "texts", {"files": [__file__]}, "data.sources.texts:TextSource", "")}
    config = PackConfig(out=str(tmp_path / "out"), sources=sources, vocabulary=str(tmp_path / "words.json"))
    assert "docs: 1 input shards" in pack_report(config, [], Rank())
    (tmp_path / "words.json").write_text("no vocabulary")
    with pytest.raises(ValueError, match="words.json: not a vocabulary of the tokenizers library"):
        pack_report(config, [], Rank())


def test_a_dry_run_assumes_the_sizes_of_a_token_encoder_of_ones_own(recipe, tmp_path, monkeypatch):
    """It has no key `path`, perhaps, and other tokens per side than DALL-E's."""
    dvae = {"image_encoder": {"name": "dvae", "path": "a/b"}, "text_encoder": None}
    config = load_config(recipe(**dvae), [], EncodeConfig, missing=[])
    own = dataclasses.replace(config.image_encoder, name="mine", args={})
    monkeypatch.setattr("precompute.config.TOKEN_ENCODERS", ("dvae", "mine"))
    report = encode_report(dataclasses.replace(config, image_encoder=own, resolutions=[20]), [], Rank())
    assert "sizes of the image encoder are assumed to be DALL-E's: mine is not loaded" in report


@pytest.mark.parametrize("wrapped", [lambda text: text, lambda text: {"model_type": "clip", "text_config": text}])
def test_a_dry_run_takes_the_sizes_of_a_local_text_encoder(recipe, tmp_path, wrapped):
    text = {"name": "hf_clip_text", "path": str(tmp_path), "subfolder": "text"}
    config = load_config(recipe(text_encoder=text), [], EncodeConfig)
    lines = encode_report(config, [], Rank())
    assert text_shape(config.text_encoder) == (USUAL_TEXT, False)
    assert "sizes of the text encoder are assumed to be Stable Diffusion 2's: there is no local config" in lines
    write_json(tmp_path / "text" / "config.json", wrapped({"max_position_embeddings": 12, "hidden_size": 16}))
    assert text_shape(config.text_encoder) == ((12, 16), True)
    assert "assumed" not in encode_report(config, [], Rank())


@pytest.mark.parametrize(
    ("part", "file", "values", "message"),
    [
        ("image", "config.json", {"latent_channels": "4", "block_out_channels": [8]}, "latent_channels is '4'"),
        ("image", "config.json", {"latent_channels": 4, "block_out_channels": 8}, "block_out_channels is 8"),
        ("image", "config.json", [4], "it is not a JSON object"),
        ("text", "config.json", {"max_position_embeddings": 0, "hidden_size": 16}, "max_position_embeddings is 0"),
        ("text", "config.json", {"text_config": 3}, "TypeError"),
        ("text", "open_clip_config.json", {"model_cfg": {"text_cfg": None}}, "TypeError"),
        ("text", "open_clip_config.json", {"model_cfg": {"text_cfg": {"width": None}}}, "width is None"),
    ],
)
def test_a_dry_run_names_a_config_with_values_of_other_types(recipe, tmp_path, part, file, values, message):
    config = load_config(recipe(), [], EncodeConfig)
    encoder = getattr(config, f"{part}_encoder")
    config = dataclasses.replace(
        config, **{f"{part}_encoder": dataclasses.replace(encoder, args={"path": str(tmp_path)})}
    )
    write_json(tmp_path / file, values)
    with pytest.raises(ValueError, match=f"^{tmp_path}/{file}: not the config of an encoder .*{message}"):
        encode_report(config, [], Rank())


def test_a_dry_run_says_what_is_to_be_scored_first(recipe, tars, tmp_path):
    source = {"name": "scored", "source": {"name": "tars", "urls": f"{tars}/*.tar"}, "scores": str(tmp_path)}
    config = load_config(recipe(sources={"train": source | {"at_least": 0.2}}), [], EncodeConfig)
    report = encode_report(config, [], Rank.from_environment())
    assert f"train: the source cannot be read yet: no file {tmp_path}/facts.json; finish precompute/scores" in report


def test_hashes_and_compressions_are_those_of_the_format():
    assert set(get_hashes()) == HASHES
    given = {name for name in get_compressions() if COMPRESSIONS.fullmatch(name)}
    assert given == set(get_compressions())


def test_dry_run_counts_shards_and_bytes(encoded, recipe, tmp_path):
    path = encoded.parents[1] / "encode.yaml"
    done = run(str(path), "--dry-run", cwd=tmp_path)
    columns = LatentColumns({16: (4, 8, 8), 32: (4, 16, 16)}, (12, 16))
    assert "train: 3 input shards, 3 done, 0 to do" in done.stdout
    expected = sum(columns.bytes_by_part().values())
    size = int(done.stdout.partition("expected size: ")[2].partition(" bytes")[0].replace(",", ""))
    real = json.loads((encoded / "manifest.json").read_text())
    assert expected + 60 < size < expected + 80  # key, caption, and three numbers of the MDS format
    assert abs(size - real["bytes"] / real["samples"]) / size < 0.2
    assert not (tmp_path / "out").exists()
    done = run(recipe(), "sources.train.urls=missing/{00..02}.tar", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "cannot be read yet" in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_of_a_launcher_prints_a_dry_run(recipe, tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    encode([recipe(), "--dry-run"])
    assert ("for each of 2 ranks" in capsys.readouterr().out) == (rank == 0)
    pack([str(ROOT / "yamls" / "docs_pack.yaml"), f"out={tmp_path}", "--dry-run"])
    assert ("for each of 2 ranks" in capsys.readouterr().out) == (rank == 0)


def test_there_is_an_uploader_and_a_downloader_for_each_scheme():
    assert set(UPLOADED) <= set(UPLOADERS) and set(UPLOADED) <= set(DOWNLOADER_MAPPINGS)


def test_a_complete_set_is_skipped_without_torch(encoded, tmp_path):
    done = run(str(encoded.parents[1] / "encode.yaml"), cwd=tmp_path)
    assert done.returncode == 0 and "already complete" in done.stdout


def test_shipped_recipes():
    config = load_config(ROOT / "yamls" / "sd2_encode.yaml", [], EncodeConfig, missing=[])
    assert config.resolutions == [256] and image_shape(config.image_encoder) == ((4, 8), False)
    assert text_shape(config.text_encoder) == ((77, 1024), True)
    assert config.text_encoder.args["layer"] == "penultimate"
    large = load_config(ROOT / "yamls" / "sd2_encode_512.yaml", [], EncodeConfig, missing=[])
    assert large.resolutions == [512] and large.out != config.out and large.text_encoder == config.text_encoder
    assert [c.filter.args["min_side"] for c in (config, large)] == [256, 512]
    config = load_config(ROOT / "yamls" / "openmoji_encode.yaml", [], EncodeConfig, missing=[])
    assert list(config.sources) == ["train", "val"]
    for name in ("sd2_encode", "openmoji_encode"):
        head = (ROOT / "yamls" / f"{name}.yaml").read_text().partition("\n\n")[0]
        assert all(word in head for word in ("Source", "Hardware", "Expected", "Command"))


@pytest.mark.parametrize(
    ("name", "kind", "key"),
    [
        ("openmoji_encode", EncodeConfig, "out"),
        ("openmoji_vocabulary", VocabularyConfig, "out"),
        ("docs_pack", PackConfig, "out"),
        ("openmoji_evaluate", Evaluation, "out"),
        ("openmoji_text", Recipe, "output"),
    ],
)
def test_the_home_folder_is_not_a_folder_named_tilde(name, kind, key):
    config = load_config(ROOT / "yamls" / f"{name}.yaml", [f"{key}=~/made.json"], kind, missing=[])
    assert getattr(config, key) == str(Path.home() / "made.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("out", "", "out: empty; give a folder"),
        ("out", "s3://bucket/set", "out: s3://bucket/set is remote"),
        ("upload", "bucket/set", "upload: bucket/set; give an address"),
        ("upload", "ftp://host/set", "upload: ftp://host/set: nothing uploads to ftp://; give s3://, gs://, oci://"),
        ("upload", "hf://datasets/a/b", "upload: hf://datasets/a/b: nothing uploads to hf://; give s3://, gs://"),
        ("upload", "azure://sets", "upload: azure://sets; give azure://ACCOUNT.blob.core.windows.net/CONTAINER/"),
        ("sources", {}, "sources: empty"),
        ("sources", {"a/b": {"name": "tars", "urls": "x"}}, "sources.a/b: a label is the name of a folder"),
        ("resolutions", [], "resolutions: []"),
        ("resolutions", [0], "resolutions: [0]"),
        ("batch", 0, "batch: 0"),
        ("workers", -1, "workers: -1"),
        ("prefetch", 0, "prefetch: 0"),
        ("size_limit", "5gb", "size_limit: 5gb"),
        ("compression", "zip", "compression: zip"),
        ("compression", "zstd:99", "compression: zstd:99"),
        ("hashes", ["xxh3"], "hashes: xxh3; did you mean `xxh"),
        ("seed", -1, "seed: -1; give 0 or more"),
        ("hashes", ["xxh64", "md5"], "hashes: "),
        ("crop", "left", "'left'"),
    ],
)
def test_values_are_checked(recipe, key, value, message):
    with pytest.raises(ValueError) as error:
        load_config(recipe(**{key: value}), [], EncodeConfig)
    assert message in str(error.value)
