"""Scores of pairs: against the model itself, resumed, as a filter of a source, and images that two sets share."""

import io
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image

from data.score_files import ShardScores, read_scores, score_file, write_scores
from data.sources.base import Rejected, Sample
from data.sources.filters import Filter
from data.sources.folder import FolderSource
from data.sources.scored import ScoredSource
from data.sources.unshared import UnsharedSource
from data.system.files import write_json
from precompute import scores
from precompute.output.claims import LOST, Claims
from precompute.output.output_set import OutputSet
from precompute.output.problems import Problem
from precompute.scoring import duplicates
from precompute.scoring import job as score_job
from precompute.scoring.duplicates import similar_rows
from tests.precompute.output_sets import age, begin_hours_ago

COLOURS = {"train": ["red", "green", "blue", "yellow", "white"], "val": ["navy", "red", "white"]}


def picture(colour):
    """A PNG of two colours."""
    image = Image.new("RGB", (24, 20), colour)
    image.paste(Image.new("RGB", (8, 20), "black"), (len(colour), 0))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def job(tmp_path_factory, clip_folder):
    """The YAML of a job over two folders of pictures that share some, its folder, and its arguments."""
    root = tmp_path_factory.mktemp("scores")
    for split, colours in COLOURS.items():
        (root / split).mkdir()
        for i, colour in enumerate(colours):
            (root / split / f"{i}_{colour}.png").write_bytes(picture(colour))
            (root / split / f"{i}_{colour}.txt").write_text(f"a {colour} picture")
        (root / split / "broken.png").write_bytes(b"nothing")
        (root / split / "broken.txt").write_text("broken")
    values = {
        "out": str(root / "out"),
        "sources": {split: {"name": "folder", "path": str(root / split)} for split in COLOURS},
        "resolutions": [16],
        "image_encoder": {"name": "kl_vae", "path": str(clip_folder)},  # not loaded: nothing is encoded
        "text_encoder": {"name": "open_clip_text", "path": str(clip_folder)},
        "batch": 2,
        "device": "cpu",
    }
    (root / "job.yaml").write_text(yaml.safe_dump(values))
    arguments = [str(root / "job.yaml"), f"--model={clip_folder}"]
    scores.main([*arguments, "--shared", "val", "train", "--threshold", "0.999"])
    return root, arguments


def shards_of(root, split):
    return FolderSource(path=str(root / split)).shards()


def test_images_are_decoded_while_the_model_works():
    """Of three batches of two, each of the first two is scored only after the next one has begun to be decoded."""
    begun = [threading.Event() for _ in range(6)]
    samples = [Sample(str(i), Image.new("RGB", (16, 16), (i, i, i)), "a picture") for i in range(6)]

    def decode(sample, shrink_to):
        begun[int(sample.key)].set()
        return Filter().decode(sample, shrink_to)

    def embed(images, batch):
        following = int(images[-1, 0, 0, 0]) + 1
        assert following == 6 or begun[following].wait(60)
        return np.ones((len(images), 4), np.float32)

    scorer = SimpleNamespace(size=(16, 16), embed_images=embed, embed_captions=lambda captions, batch: np.ones((2, 4)))
    source, decoder = SimpleNamespace(read=lambda shard: iter(samples)), SimpleNamespace(decode=decode)
    with ThreadPoolExecutor(1) as pool:
        found = score_job.score_shard(source, "a", decoder, scorer, 2, pool, keep=lambda: None)
    assert found.keys == list("012345") and found.similarities.tolist() == [4.0] * 6


class Renames(Filter):
    def decode(self, sample, shrink_to=None):
        return replace(super().decode(sample, shrink_to), key=f"renamed {sample.key}")


def test_scores_belong_to_the_keys_of_the_source():
    """Of two samples with one key, the sources that leave samples out took the score of the last one, and of images
    that a filter had given another key they left out none."""
    scorer = SimpleNamespace(size=(16, 16), embed_images=lambda images, batch: np.ones((len(images), 4), np.float32))
    scorer.embed_captions = lambda captions, batch: np.ones((len(captions), 4))

    def score(*keys):
        samples = [Sample(key, picture("red"), "a picture") for key in keys]
        source = SimpleNamespace(read=lambda shard: iter(samples))
        with ThreadPoolExecutor(1) as pool:
            return score_job.score_shard(source, "s", Renames(), scorer, 2, pool, keep=lambda: None).keys

    assert score("a", "b", "c") == ["a", "b", "c"]
    with pytest.raises(ValueError, match="^the source yields the key 'a' twice in the shard s; yield each key once"):
        score("a", "b", "c", "a")


def test_scores_are_the_models(job, clip_folder):
    from recipes.scoring.reranking import Reranker

    root, _ = job
    scorer = Reranker(str(clip_folder), "cpu")
    (shard,) = shards_of(root, "train")
    found = read_scores(root / "out" / "train" / "scores", shard)
    assert len(found.keys) == 5 and not any("broken" in key for key in found.keys)
    for key, embedding, similarity in zip(found.keys, found.embeddings, found.similarities, strict=True):
        colour = key.split("_")[1].split(".")[0]
        square = Image.open(io.BytesIO(picture(colour))).crop((2, 0, 22, 20)).resize((16, 16), Image.Resampling.BICUBIC)
        seen = scorer.embed_images(np.array(square)[None])[0]
        np.testing.assert_allclose(embedding, seen, atol=2e-2)  # resized in another way, and stored as fp16
        known = float(seen @ scorer.embed_captions([f"a {colour} picture"])[0])
        assert similarity == pytest.approx(known, abs=2e-2)
    summary = json.loads((root / "out" / "train" / "scores" / "summary.json").read_text())
    assert summary["pairs"] == 5 and summary["mean"] == pytest.approx(found.similarities.mean(), abs=1e-5)
    assert summary["quantiles"]["0"] == pytest.approx(found.similarities.min(), abs=1e-5)
    assert (root / "out" / "train" / "scores" / "similarities.png").is_file()


def test_images_that_two_sets_share(job):
    root, _ = job
    folder = root / "out" / "val" / "scores"
    result = json.loads((folder / "shared.json").read_text())
    pairs = {(pair["image"]["key"].split("_")[1], pair["other"]["key"].split("_")[1]) for pair in result["pairs"]}
    assert {("red", "red"), ("white", "white")} <= pairs and result["images"] == 3 and result["shared"] >= 2
    assert all(pair["similarity"] >= 0.999 for pair in result["pairs"]) and result["nearest"]["1"] > 0.999
    assert Image.open(folder / "shared.png").size[0] > 8 * 128


def test_a_set_has_no_image_twice_but_as_itself(job):
    root, arguments = job
    scores.main([*arguments, "--shared", "train", "train", "--threshold=-1"])
    result = json.loads((root / "out" / "train" / "scores" / "shared.json").read_text())
    assert len(result["pairs"]) == 5 * 4 / 2 and "nearest" not in result


def test_the_most_similar_images_of_all_shards_are_listed(tmp_path, monkeypatch):
    rows = {"val": {"v": [0.0]}, "train": {"a": [0.9, 0.1], "b": [0.2, 1.2], "c": [0.8, 0.7], "d": []}}  # angles
    sources = {label: SimpleNamespace(shards=lambda shards=shards: list(shards)) for label, shards in rows.items()}
    for label, shards in rows.items():
        write_json(tmp_path / label / "scores" / "facts.json", {"weights_hash": "1"})
        for shard, angles in shards.items():
            embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float16)
            embeddings = embeddings if angles else np.empty((0, 0), np.float16)  # all of them were rejected
            scores_of = ShardScores([str(angle) for angle in angles], embeddings, np.ones(len(angles), np.float32))
            write_scores(score_file(tmp_path / label / "scores", shard), scores_of)
    for name, value in {"KEPT": 2, "build": lambda source: source, "_sheet": lambda *arguments: None}.items():
        monkeypatch.setattr(duplicates, name, value)
    config = SimpleNamespace(out=tmp_path, sources=sources, filter=None)
    found = duplicates.write_shared(config, "val", "train", threshold=0.5)
    assert [(pair["other"]["shard"], pair["other"]["key"]) for pair in found["pairs"]] == [("a", "0.1"), ("b", "0.2")]
    assert found["nearest"]["0"] == found["nearest"]["1"] == pytest.approx(np.cos(0.1), abs=1e-3)
    sheet = tmp_path / "val" / "scores" / "shared.png"
    sheet.touch()  # of the pairs above
    assert duplicates.write_shared(config, "val", "train", threshold=1)["pairs"] == [] and not sheet.exists()
    write_json(tmp_path / "val" / "scores" / "facts.json", {"weights_hash": "2"})
    with pytest.raises(ValueError, match="val and train were scored by different models; delete one"):
        duplicates.write_shared(config, "val", "train", threshold=0.5)


def test_an_error_of_a_filter_names_the_sample_also_in_what_draws_the_sheet(job, tmp_path, monkeypatch, capsys):
    """There it was the filter's words alone, and nobody could tell of which sample."""

    def decode(self, sample, shrink_to=None):
        raise ValueError("no palette")

    root, arguments = job
    shutil.copytree(root / "out", tmp_path / "out")  # where no shard is left to decode
    monkeypatch.setattr(Filter, "decode", decode)
    with pytest.raises(SystemExit):
        scores.main([*arguments, f"out={tmp_path}/out", "--shared", "val", "train", "--threshold", "0.999"])
    assert "error: no palette (Filter.decode() of the sample '0_navy')\n" in capsys.readouterr().err


@pytest.mark.parametrize("block", [1, 3, 100])
def test_similarities_block_by_block(block, monkeypatch):
    monkeypatch.setattr(duplicates, "BLOCK", block)
    rng = np.random.default_rng(0)
    one, other = (rng.normal(size=(rows, 4)) for rows in (7, 5))
    one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
    largest, pairs = similar_rows(one, other, 0.2)
    known = one @ other.T
    np.testing.assert_allclose(largest, known.max(1), rtol=1e-5)
    assert sorted((i, j) for i, j, _ in pairs) == [tuple(place) for place in np.argwhere(known >= 0.2).tolist()]
    assert all(s == pytest.approx(known[i, j], rel=1e-5) for i, j, s in pairs)


def test_an_embedding_of_zeros_is_similar_to_none():
    """Its similarities were NaN, and so were the figures of the whole set in shared.json, which is no JSON."""
    rows = np.array([[0, 0], [1, 0]], np.float16)
    largest, pairs = similar_rows(rows, rows, 0.5)
    assert largest.tolist() == [0, 1] and pairs == [(1, 1, 1.0)]


@pytest.mark.parametrize("width", [16, 512, 1024])
def test_equal_images_have_a_similarity_of_1(width):
    """Embeddings are stored in 16 bits, in which their lengths are not quite 1."""
    rows = np.random.default_rng(0).normal(size=(60, width))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)
    largest, pairs = similar_rows(rows, rows, 1.0)
    assert (largest == 1).all() and pairs == [(i, i, 1.0) for i in range(60)]


def test_it_goes_on_where_it_stopped(job, monkeypatch):
    root, arguments = job
    (shard,) = shards_of(root, "val")
    file = score_file(root / "out" / "val" / "scores", shard)
    before = file.read_bytes()
    file.unlink()
    done, real = [], score_job.score_shard

    def counted(source, shard, *rest):
        done.append(shard)
        return real(source, shard, *rest)

    monkeypatch.setattr(score_job, "score_shard", counted)
    scores.main(arguments)
    assert done == [shard] and file.read_bytes() == before
    scores.main(arguments)
    assert done == [shard]


def test_a_source_that_is_read_otherwise(job, capsys):
    """Its scores are of other captions. Those of earlier versions, which do not say how it was read, go on."""
    root, arguments = job
    table = root / "val" / "other.csv"
    table.write_text("file,caption\n0_navy.png,another\n")
    facts = root / "out" / "val" / "scores" / "facts.json"
    before = facts.read_text()
    with pytest.raises(SystemExit):
        scores.main([*arguments, f"sources.val.captions={table}"])
    error = capsys.readouterr().err
    assert "holds scores by source {'name': 'folder', 'captions': 'txt'}, this job has" in error
    assert "delete the folder to score again" in error and facts.read_text() == before
    facts.write_text(json.dumps({name: value for name, value in json.loads(before).items() if name != "source"}))
    scores.main(arguments)
    assert facts.read_text() == before
    table.unlink()


def test_a_model_that_reads_pictures_otherwise(job, clip_folder, tmp_path, capsys):
    """The same weights give other embeddings with another mean of pixels, which its config names."""
    root, (yaml_file, _) = job
    model = shutil.copytree(clip_folder, tmp_path / "model")
    config = json.loads((model / "open_clip_config.json").read_text())
    config["preprocess_cfg"] = {"mean": [0.1, 0.2, 0.3]}
    (model / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        scores.main([yaml_file, f"--model={model}"])
    assert "scores: holds scores by" in capsys.readouterr().err


def test_two_ranks_write_what_one_does(job, monkeypatch, tmp_path):
    root, arguments = job
    shared = ["--shared", "val", "train", "--threshold", "0.999"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    files = {"summary.json", "similarities.png"}
    assert Claims(OutputSet(tmp_path / "val" / "scores", []), 1).take(*shards_of(root, "val"))
    for rank, split in enumerate(COLOURS):
        monkeypatch.setenv("RANK", str(rank))
        scores.main([*arguments, *shared, f"out={tmp_path}"])
        (shard,) = shards_of(root, split)
        file = score_file(tmp_path / split / "scores", shard)
        assert file.read_bytes() == score_file(root / "out" / split / "scores", shard).read_bytes()
        if rank == 0:  # the other set is left, so this rank compares no images
            assert not score_file(tmp_path / "val" / "scores", shards_of(root, "val")[0]).exists()
            assert not (tmp_path / "val" / "scores" / "shared.json").exists()
    for split in COLOURS:
        for name in files | ({"shared.json", "shared.png"} if split == "val" else set()):
            assert (tmp_path / split / "scores" / name).read_bytes() == (
                root / "out" / split / "scores" / name
            ).read_bytes(), name


def test_a_rank_without_work_scores_the_shards_of_a_lost_one(job, monkeypatch, tmp_path):
    root, arguments = job
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "7")  # it has no shard of its own
    (shard,) = shards_of(root, "val")
    OutputSet(tmp_path / "val" / "scores", []).note_unreadable(shard, Problem("the server is gone"))
    os.utime(tmp_path / "val" / "scores" / "unreadable" / f"{shard}.json", (1, 1))  # before this start
    scores.main([*arguments, f"out={tmp_path}"])
    for split in COLOURS:
        assert not [*(tmp_path / split / "scores" / "unreadable").glob("*")]
        known = root / "out" / split / "scores" / "summary.json"
        assert (tmp_path / split / "scores" / "summary.json").read_bytes() == known.read_bytes()
        assert not (tmp_path / split / "scores" / "begun").exists()


def test_a_rank_keeps_a_shard_whose_scores_take_it_hours(job, monkeypatch, tmp_path):
    root, arguments = job
    ages, write = [], write_scores

    def looked_at(file, found):
        ages.append(age(OutputSet(file.parents[1], []), file.stem))
        write(file, found)

    begin_hours_ago(monkeypatch)
    monkeypatch.setattr(score_job, "write_scores", looked_at)
    monkeypatch.setenv("WORLD_SIZE", "2")
    scores.main([*arguments, f"out={tmp_path}"])
    assert len(ages) == 2 and max(ages) < LOST


def test_a_shard_that_cannot_be_read_does_not_end_the_others(job, monkeypatch, tmp_path, capsys):
    """The last rank names it: a rank that fails earlier would make the launcher stop the others."""
    root, arguments = job
    read = FolderSource.read
    (broken,), (other,) = (shards_of(root, split) for split in COLOURS)

    def refuse(self, shard):
        if shard == broken:
            raise ConnectionError("the server is gone")
        return read(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "read", refuse)
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "0")
        assert Claims(OutputSet(tmp_path / "val" / "scores", []), 1).take(other)
        scores.main([*arguments, f"out={tmp_path}"])
        assert f"{broken} could not be read: the server is gone" in capsys.readouterr().out
        patch.setenv("RANK", "1")
        with pytest.raises(SystemExit):
            scores.main([*arguments, f"out={tmp_path}"])
    assert "1 input shards could not be read" in (error := capsys.readouterr().err) and "the server is gone" in error
    assert score_file(tmp_path / "val" / "scores", other).exists()
    assert (tmp_path / "val" / "scores" / "summary.json").exists()
    scores.main([*arguments, f"out={tmp_path}"])
    assert (tmp_path / "train" / "scores" / "summary.json").exists()


def test_a_set_without_pairs_does_not_hold_up_the_others(job, tmp_path, capsys):
    root, arguments = job
    (tmp_path / "broken").mkdir()
    for name in ("0.png", "0.txt"):
        (tmp_path / "broken" / name).write_text("no picture")
    with pytest.raises(SystemExit):
        scores.main([*arguments, f"out={tmp_path}/out", f"sources.train.path={tmp_path}/broken"])
    assert f"{tmp_path}/out/train/scores: no pair passed the filter" in capsys.readouterr().err
    written = (tmp_path / "out" / "val" / "scores" / "summary.json").read_bytes()
    assert written == (root / "out" / "val" / "scores" / "summary.json").read_bytes()


def test_a_source_without_pairs_that_do_not_fit(job, tmp_path):
    root, _ = job
    folder, (shard,) = root / "out" / "train" / "scores", shards_of(root, "train")
    found = read_scores(folder, shard)
    short = read_scores(folder, shard, embeddings=False)
    assert short.keys == found.keys and (short.similarities == found.similarities).all()
    assert len(found.embeddings) == 5 and not len(short.embeddings)
    threshold = float(np.sort(found.similarities)[2])
    source = ScoredSource(source=FolderSource(path=str(root / "train")), scores=str(folder), at_least=threshold)
    assert source.shards() == [shard]
    samples = list(source.read(shard))
    kept = [sample.key for sample in samples if isinstance(sample, Sample)]
    assert kept == [key for key, s in zip(found.keys, found.similarities, strict=True) if s >= threshold]
    rejected = {sample.key: sample for sample in samples if isinstance(sample, Rejected)}
    assert len(kept) == 3 and {r.reason for r in rejected.values()} == {"low_similarity"} and len(rejected) == 3
    found.similarities[0] = np.nan
    write_scores(score_file(tmp_path, shard), found)
    rows = list(ScoredSource(source=source.source, scores=str(tmp_path), at_least=-1.0).read(shard))
    assert [row.key for row in rows if getattr(row, "detail", "") == "nan"] == [found.keys[0]]
    write_scores(score_file(tmp_path, shard), replace(found, keys=[f"{key}_of_another" for key in found.keys]))
    with pytest.raises(ValueError, match=f"{shard}.npz: scores of other samples; delete it"):
        list(ScoredSource(source=source.source, scores=str(tmp_path), at_least=0.0).read(shard))
    with pytest.raises(FileNotFoundError, match="finish precompute/scores.py first"):
        list(ScoredSource(source=source.source, scores=str(root), at_least=0.0).read(shard))
    with pytest.raises(ValueError, match="source.at_least: 28; give a cosine similarity"):
        ScoredSource(source=source.source, scores=str(folder), at_least=28)


def test_a_source_without_the_images_that_another_set_has(job):
    root, _ = job
    shared = root / "out" / "val" / "scores" / "shared.json"
    pairs = [(pair["similarity"], pair["image"]["key"]) for pair in json.loads(shared.read_text())["pairs"]]
    listed = {key for _, key in pairs}
    assert {key.split("_")[1].split(".")[0] for key in listed} >= {"red", "white"}
    inner = FolderSource(path=str(root / "val"))
    (shard,) = inner.shards()
    everything = {sample.key for sample in inner.read(shard)}
    source = UnsharedSource(source=inner, shared=str(shared))
    assert source.shards() == [shard] == json.loads(shared.read_text())["shards"]
    rows = list(source.read(shard))
    assert {row.key for row in rows if isinstance(row, Sample)} == everything - listed
    assert {row.key for row in rows if isinstance(row, Rejected) and row.reason == "shared_image"} == listed
    other = UnsharedSource(source=FolderSource(path=str(root / "train")), shared=str(shared))
    with pytest.raises(ValueError, match="is of other shards"):
        other.shards()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model=none"], "--model: no file none"),
        (["--shared", "val", "test"], "--shared: no source test; this job has train, val"),
        (["--threshold", "95"], "--threshold=95.0; give a cosine similarity"),
        (["filter={name: pictures, min_side: 9}"], "holds scores by filter"),
        (["--dry-run"], "--dry-run: scores.py has nothing to try"),
    ],
)
def test_bad_input_in_one_line(job, changes, message, capsys):
    root, (file, model) = job
    with pytest.raises(SystemExit) as end:
        scores.main([file, *changes] if changes[0].startswith("--model") else [file, model, *changes])
    assert end.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        scores.main([file])
    assert capsys.readouterr().err.startswith("error: --model: missing")


@pytest.mark.parametrize("content", ["[]", "{}", "null", "[" * 200_000])
def test_scores_of_an_unknown_model_are_not_taken_for_this_ones(content, tmp_path):
    (tmp_path / "facts.json").write_text(content)
    with pytest.raises(ValueError, match=r"facts.json: damaged .*; delete .* and start precompute/scores.py") as error:
        score_job.claim(tmp_path, {"model": "mine"})
    assert "\n" not in str(error.value) and (tmp_path / "facts.json").read_text() == content


def test_a_damaged_file_is_named(tmp_path):
    score_file(tmp_path, "a").parent.mkdir()
    score_file(tmp_path, "a").write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(ValueError, match="a.npz: damaged"):
        read_scores(tmp_path, "a")
    numbers = np.zeros(2, np.float32)
    for keys, similarities in ((["a", ["b"]], numbers), (["a", "b"], np.array(["0", "1"])), (["a"], numbers[:, None])):
        write_scores(score_file(tmp_path, "a"), ShardScores(keys, np.zeros((len(keys), 3), np.float16), similarities))
        with pytest.raises(ValueError, match="a.npz: damaged"):
            read_scores(tmp_path, "a", embeddings=False)
