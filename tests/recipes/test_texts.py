"""A language model from text files to a perplexity: vocabulary, packed rows, training. On one process."""

import json
import math
import os
import re
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.killing import digests
from callbacks.unigram import unigram_loss
from data.encoded.sets import local_set, remote_set
from data.encoded.text_manifest import NAME, TextManifest
from data.loading import Placement
from data.sources.tars import TarSource
from data.texts import texts
from data.tokenizers.bpe import Vocabulary
from precompute import pack
from precompute.output.claims import LOST, Claims
from precompute.output.output_set import MERGING, OutputSet
from precompute.output.shard_folder import ShardFolder
from precompute.texts import packing
from precompute.texts.packing import Packed
from recipes.config.recipe import Recipe, load_config
from recipes.models.language.task import load_language
from recipes.planning.dry_run import survey
from tests.locks import held_by_a_child
from tests.precompute.output_sets import ages_when_published
from tests.recipes.engines.recording import record

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model={layers: 2, width: 32, heads: 2, positions: 16, vocabulary: 512}",
    "data={workers: 0, streams: {docs: {repeat: 0.1}}}",
    "optimizer.lr=1e-2",
    "schedule.warmup=5ba",
    "training={duration: 60ba, device: cpu, eval_every: null}",
    "loggers={}",
]


def recipe(sets, output, *changes):
    paths = [f"data.streams.{label}.path={sets}/{label}" for label in ("docs", "captions")]
    paths += [f"evals.val.streams.val.path={sets}/docs_val", f"output={output}"]
    return load_config(ROOT / "yamls" / "docs_gpt2.yaml", [*SMALL, *paths, *changes], Recipe)


@pytest.fixture(scope="module")
def trained(text_sets, tmp_path_factory):
    """A finished run: its folder, and what was recorded."""
    output = tmp_path_factory.mktemp("texts") / "run"
    return output, record("composer", recipe(text_sets, output))


def test_its_perplexity_is_below_that_of_frequencies(trained):
    _, run = trained
    ((batch, label, figures),) = run.evals
    unigram = run.callbacks["unigram"]
    frequencies = math.exp(unigram_loss(unigram.seen, unigram.validated))
    assert (batch, label) == (60, "val") and figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["perplexity"] < 0.9 * frequencies < 301


def test_its_export_predicts_as_it_does(trained, text_sets):
    output, run = trained
    network = load_language(output / "export" / "transformer")
    assert (output / "export" / "vocabulary.json").read_bytes() == (text_sets / "vocabulary.json").read_bytes()
    weights = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    assert weights.keys() == run.weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.weights.items())


@pytest.mark.parametrize("workers", [0, 1])
def test_tokens_that_the_vocabulary_does_not_have(text_sets, tmp_path, workers):
    """A GPU would end the process with an assertion that names no row."""
    shutil.copytree(text_sets / "docs", tmp_path / "set")
    values = json.loads((tmp_path / "set" / NAME).read_text()) | {"vocabulary": 299}
    (tmp_path / "set" / NAME).write_text(json.dumps(values))
    needs, streams = {"positions": 16, "vocabulary": 299}, {"a": local_set(path=str(tmp_path / "set"))}
    loading = texts(Placement(2, False), needs, streams=streams, workers=workers)
    line = r"^texts: \S+ has the token \d{3}, its vocabulary has 299 tokens from 0; pack the texts again$"
    with pytest.raises(ValueError, match=line):
        list(loading.loader)


def test_texts_that_do_not_fit_the_model(text_sets, tmp_path):
    with pytest.raises(ValueError, match="rows have 16 positions, the model 8; give the model as many"):
        record("composer", recipe(text_sets, tmp_path, "model.positions=8"))
    with pytest.raises(ValueError, match="the texts have 301 tokens, the model 300; give the model as many or more"):
        record("composer", recipe(text_sets, tmp_path, "model.vocabulary=300"))


def test_sets_of_several_vocabularies(text_sets, tmp_path):
    """Dry runs refuse them in the words of the run, and a set that is not there says nothing."""
    (tmp_path / "other").mkdir()
    other = json.loads((text_sets / "captions" / NAME).read_text()) | {"vocabulary_hash": "0"}
    (tmp_path / "other" / NAME).write_text(json.dumps(other))
    both = recipe(text_sets, tmp_path, f"data.streams.captions.path={tmp_path}/other")
    with pytest.raises(ValueError, match="streams.captions was packed with another vocabulary than streams.docs"):
        survey(both)
    (tmp_path / "other" / NAME).unlink()
    assert survey(both).length.epoch_steps is None


def test_a_changed_vocabulary_in_a_set_is_refused(text_sets, tmp_path):
    """A run does not read it, and its export would give other tokens than it was trained with."""
    shutil.copytree(text_sets / "docs", tmp_path / "docs")
    vocabulary = tmp_path / "docs" / "vocabulary.json"
    vocabulary.write_bytes(vocabulary.read_bytes().replace(b'"Lowercase"', b'"lowercase"'))
    with pytest.raises(ValueError, match=f"{vocabulary}: damaged, or of other texts: .* copy the set again"):
        record("composer", recipe(text_sets, tmp_path / "run", f"data.streams.docs.path={tmp_path}/docs"))


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_rows_of_other_texts_are_not_taken_for_them(text_sets, capsys, flags):
    with pytest.raises(SystemExit):
        pack.main([str(text_sets / "docs" / "config.yaml"), "sources.docs.column=other", *flags])
    assert "holds values made with source {" in capsys.readouterr().err


def test_a_dry_run_says_what_a_row_takes_on_disk(text_sets, capsys):
    pack.main([str(text_sets / "docs" / "config.yaml"), "--dry-run"])
    (size,) = re.findall(r"expected size: (\d+) bytes per row of 16 \+ 1 tokens", capsys.readouterr().out)
    manifest = TextManifest.read(text_sets / "docs" / NAME)
    assert int(size) == pytest.approx(manifest.bytes / manifest.samples, rel=0.05)


def pack_again(text_sets, out):
    """Packs the texts of a set again; the parts of its own folder that must be the same."""
    config = [str(text_sets / "docs" / "config.yaml"), f"out={out}"]
    pack.main(config)
    return digests(out / "docs"), digests(text_sets / "docs")


def test_a_rank_without_work_packs_the_shards_of_a_lost_one(text_sets, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1000")
    monkeypatch.setenv("RANK", "999")  # it has no shard of its own
    found, known = pack_again(text_sets, tmp_path)
    assert found == known and not (tmp_path / "docs" / "begun").exists()


def test_a_rank_that_was_taken_for_lost_leaves_the_shard_that_it_packs(text_sets, tmp_path, monkeypatch):
    close, gone = ShardFolder.close, []

    def hours_later(folder, **facts):
        if folder.shard in os.listdir(text_sets / "docs" / "shards"):
            gone.append(folder.folder)
            shutil.copytree(text_sets / "docs" / "shards" / folder.shard, folder.folder.with_name(folder.shard))
            shutil.rmtree(folder.folder)
        return close(folder, **facts)

    monkeypatch.setattr(ShardFolder, "close", hours_later)
    found, known = pack_again(text_sets, tmp_path)
    assert gone and found == known


def test_a_rank_keeps_texts_that_take_it_hours(text_sets, tmp_path, monkeypatch):
    ages = ages_when_published(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    pack_again(text_sets, tmp_path)
    assert len(ages) > 2 and max(ages) < LOST


def test_texts_that_cannot_be_read_do_not_end_the_job(text_sets, tmp_path, monkeypatch, capsys):
    """A rank that failed would make the launcher stop the others. The last one names them, the next start tries them
    again."""
    read, (broken, _, other, _) = TarSource.read, sorted(os.listdir(text_sets / "captions" / "shards"))

    def refuse(source, shard):
        yield from islice(read(source, shard), 1)
        if shard == broken:
            raise ConnectionError("the server is gone")
        yield from islice(read(source, shard), 1, None)

    monkeypatch.setenv("WORLD_SIZE", "2")
    with monkeypatch.context() as patch:
        patch.setattr(TarSource, "read", refuse)
        left = Claims(OutputSet(tmp_path / "captions", []), 1)
        assert left.take(other)
        pack_again(text_sets, tmp_path)
        said = capsys.readouterr().out
        assert f"pack: {broken} could not be read: the server is gone" in said
        assert "captions: 1 of 4 shards are left to other ranks" in said
        assert len(os.listdir(tmp_path / "captions" / "shards")) == 2  # and no part of the broken one
        left.release(other)
        patch.setenv("RANK", "1")
        with pytest.raises(SystemExit):
            pack_again(text_sets, tmp_path)
        said = f"1 input shards could not be read; .* or take them out of the source: {broken}: the server is gone"
        assert re.search(said, capsys.readouterr().err)
        assert (tmp_path / "docs" / NAME).exists() and not (tmp_path / "captions" / NAME).exists()
    found, known = pack_again(text_sets, tmp_path)
    assert found == known and (tmp_path / "captions" / NAME).exists()
    assert digests(tmp_path / "captions") == digests(text_sets / "captions")


def test_of_ranks_that_end_together_one_merges_the_texts(text_sets, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    with held_by_a_child(tmp_path / MERGING.format("docs")) as child:
        pack.main([str(text_sets / "docs" / "config.yaml"), f"out={tmp_path}"])
    assert f"docs: all shards are done; process {child} on" in capsys.readouterr().out
    assert not (tmp_path / "docs" / NAME).exists() and (tmp_path / "captions" / NAME).exists()
    found, known = pack_again(text_sets, tmp_path)
    assert found == known


def test_texts_that_are_no_text_are_left_out_and_listed(text_sets, tmp_path):
    whole = "a text of more tokens than a row has, which is the only one that can be read"
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_text(whole)
    source = f"sources={{docs: {{files: [{tmp_path}/*.txt], exclude: null}}, captions: null, docs_val: null}}"
    pack.main([str(text_sets / "docs" / "config.yaml"), f"out={tmp_path}/out", source])
    manifest = TextManifest.read(tmp_path / "out" / "docs" / NAME)
    assert (manifest.texts, manifest.rejected) == (1, {"caption_not_utf8": 1})
    tokens = len(Vocabulary.read(text_sets / "vocabulary.json").encode(whole)) + 1
    assert manifest.samples * 16 + 1 + manifest.left_out == tokens
    (row,) = (tmp_path / "out" / "docs" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(row)["key"] == str(tmp_path / "a.txt")


def test_texts_that_fill_no_row_are_said_to(text_sets, tmp_path, capsys):
    with pytest.raises(SystemExit):
        pack.main([str(text_sets / "docs" / "config.yaml"), f"out={tmp_path}", "positions=60000"])
    assert "/docs: nothing was encoded (" in (error := capsys.readouterr().err)
    assert "tokens of texts fill no row; give fewer positions, or longer texts); see shards" in error


def test_texts_that_fill_no_row_do_not_hold_up_other_sets(text_sets, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("short")
    short = f"sources.docs={{files: [{tmp_path}/short.txt], exclude: null}}"
    with pytest.raises(SystemExit):
        pack.main([str(text_sets / "docs" / "config.yaml"), f"out={tmp_path}", short])
    assert "/docs: nothing was encoded (" in capsys.readouterr().err
    assert digests(tmp_path / "captions") == digests(text_sets / "captions")


def test_a_cache_of_other_texts_is_an_error(text_sets, tmp_path):
    cache = str(tmp_path / "cache")
    remote_set(url=str(text_sets / "docs"), cache=cache).file(NAME)
    other = remote_set(url=str(text_sets / "captions"), cache=cache)
    with pytest.raises(ValueError, match="text.json is not the one at .*captions: the cache is of another set"):
        texts(Placement(2, True), {"positions": 16, "vocabulary": 512}, streams={"a": other}, workers=0)


@pytest.mark.parametrize("at_once", [1, 20, 1 << 22])
@pytest.mark.parametrize("positions", [3, 7])
def test_rows_hold_each_token_of_the_texts_once(text_sets, positions, at_once, monkeypatch):
    """Rows overlap by one token, so each token but the first is predicted once; what fills no row is left."""
    monkeypatch.setattr(packing, "CHARACTERS", at_once)
    vocabulary = Vocabulary.read(text_sets / "vocabulary.json")
    texts = ["a dot on a wall", "of two", "drawing of 3 stars on a wall"]
    stream = [token for text in texts for token in (*vocabulary.encode(text), vocabulary.size)]
    packed = Packed(vocabulary, positions)
    rows = list(packed.rows(iter(texts)))
    assert len(rows) == (len(stream) - 1) // positions and all(row.shape == (positions + 1,) for row in rows)
    joined = [rows[0][:1], *(row[1:] for row in rows)]
    assert np.concatenate([*joined, packed.left[1:]]).tolist() == stream


def test_the_manifest_says_what_was_packed(text_sets):
    manifest = TextManifest.read(text_sets / "docs" / NAME)
    assert (manifest.positions, manifest.vocabulary, manifest.texts, manifest.rejected) == (16, 301, 2, {})
    index = json.loads((text_sets / "docs" / "index.json").read_text())
    assert manifest.samples == sum(shard["samples"] for shard in index["shards"])
    vocabulary = Vocabulary.read(text_sets / "vocabulary.json")
    texts = [ROOT / "docs" / name for name in ("comparison.md", "export.md")]
    tokens = sum(len(vocabulary.encode(text.read_text().strip())) + 1 for text in texts)
    assert manifest.samples * 16 + 1 + manifest.left_out == tokens
    with pytest.raises(FileNotFoundError, match="no packed texts; make them with precompute/pack.py"):
        TextManifest.read(text_sets / NAME)
