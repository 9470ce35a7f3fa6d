"""The folder of an encoded set: claims, shards of several ranks, merging, uploads."""

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from streaming import StreamingDataset

from data.encoded.manifest import Manifest
from data.sources.base import Rejected
from data.system.files import to_disk, write_json
from data.system.ranks import Rank
from precompute.config import EncodeConfig, reading, source_options
from precompute.encoding.job import _finish
from precompute.output import merged_index
from precompute.output.output_set import STALE, OutputSet
from precompute.output.problems import Problem
from precompute.output.upload import MARKER, Copy
from recipes.config.recipe import load_config
from tests.disks import on_disk_before_named
from tests.precompute.output_sets import FIELDS, fail, sample, write


def test_writer_keeps_the_source_order(tmp_path):
    output = OutputSet(tmp_path, ["a", "b", "empty"])
    output.claim({"x": 1})
    write(output, "b", [sample("b0", 3.0)], {"x": 1})
    write(output, "a", [sample("a0"), Rejected("a1", "broken_image", "why"), sample("a2")], {"x": 1})
    assert output.remaining() == ["empty"] and not output.is_complete({}, output.shards)
    write(output, "empty", [Rejected("e0", "empty_caption")], {"x": 1})
    manifest = output.merge(FIELDS | {"request": {"r": [8]}}, {"x": 1})
    assert (manifest.samples, manifest.rejected) == (3, {"broken_image": 1, "empty_caption": 1})
    assert manifest.latents["8"]["mean"] == [pytest.approx(5 / 3)] * 2
    assert manifest.latents["8"]["sample_std"] == [pytest.approx((8 / 9 + 11 / 3) ** 0.5)] * 2
    dataset = StreamingDataset(local=str(tmp_path), batch_size=1, shuffle=False)
    assert [dataset[i]["key"] for i in range(3)] == ["a0", "a2", "b0"]
    lines = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert lines[0] == {"key": "a1", "shard": "a", "reason": "broken_image", "detail": "why"}
    assert not output.is_complete({"r": [8]}, output.shards)  # the null caption's embedding is not there
    (tmp_path / "null_text.npy").write_bytes(b"")
    assert output.is_complete({"r": [8]}, output.shards) and output.is_complete({"r": (8,)}, output.shards)
    assert not output.is_complete({"r": [9]}, output.shards)
    assert not OutputSet(tmp_path, ["a", "b"]).is_complete({"r": [8]}, ["a"])
    assert OutputSet(tmp_path, ["a", "b"]).unknown_shards() == 1
    assert output.samples_per_shard() == pytest.approx(5 / 3)


@pytest.mark.parametrize("uploads", [True, False])
def test_a_set_that_grew_is_uploaded_again(tmp_path, monkeypatch, uploads):
    """Also where the store refused its index, or where the job that wrote it made no copy."""
    store = SimpleNamespace(upload=lambda path, name: None, abort_uploads=lambda names: None)
    monkeypatch.setattr(Copy, "_store", store)
    copy = Copy(tmp_path, "gs://bucket/set")
    output = OutputSet(tmp_path, ["a"], copy)
    write(output, "a", [sample("a0")], {})
    output.merge(FIELDS, {})
    assert output.is_complete(FIELDS["request"], output.shards)
    write(OutputSet(tmp_path, [], copy), "b", [sample("b0")], {})
    output = OutputSet(tmp_path, ["a", "b"], copy)
    with monkeypatch.context() as patch:
        if uploads:
            patch.setattr(Copy, "add", fail(ValueError("try again")))
            with pytest.raises(ValueError, match="try again"):
                output.merge(FIELDS, {})
        else:
            OutputSet(tmp_path, ["a", "b"]).merge(FIELDS, {})
    assert Manifest.read(tmp_path).shards == 2 and not output.is_complete(FIELDS["request"], output.shards)
    output.merge(FIELDS, {})
    assert output.is_complete(FIELDS["request"], output.shards)


def test_a_damaged_note_of_an_upload_is_none(tmp_path):
    copy, marker = Copy(tmp_path, "gs://bucket/set"), tmp_path / MARKER
    for note, valid in ((copy.address.encode(), True), (b"gs://bucket/other", False), (b"\xff\0", False)):
        marker.write_bytes(note)
        assert copy.has(tmp_path) == valid


def test_a_complete_set_of_an_earlier_version_stays_complete(tmp_path):
    """Its manifest does not hold how the source was read."""
    output = OutputSet(tmp_path, ["a"])
    write(output, "a", [sample("a0")], {})
    output.merge(FIELDS, {})
    assert output.is_complete(FIELDS["request"] | {"source": {"name": "tars"}}, output.shards)
    assert not output.is_complete(FIELDS["request"] | {"upscale": True}, output.shards)


def test_a_set_of_the_earlier_resampling_says_what_to_do(tmp_path):
    earlier = {"resolutions": [8], "crop": "center"}
    write(OutputSet(tmp_path, ["a", "b"]), "a", [sample("a0")], earlier)
    with pytest.raises(ValueError, match=r"resampling lanczos \(of .*; finish it with that version"):
        OutputSet(tmp_path, ["a", "b"]).claim({"resolutions": [8], "crop": "center", "resampling": "bicubic"})
    with pytest.raises(ValueError, match="values made with crop center, this job has random; give another"):
        OutputSet(tmp_path, ["a", "b"]).claim({"resolutions": [8], "crop": "random", "resampling": "bicubic"})


def test_as_many_other_shards_are_not_the_set(tmp_path):
    every = {"a": [sample("a0")], "b": [sample("b0")], "empty": [Rejected("e0", "empty_caption")]}
    for shard, samples in every.items():
        write(OutputSet(tmp_path, []), shard, samples, {})
    for shards in ["a", "b"], ["a", "empty"], ["b", "a"]:
        output = OutputSet(tmp_path, shards)
        assert not output.is_complete(FIELDS["request"], output.shards)
        output.merge(FIELDS, {})
        assert output.is_complete(FIELDS["request"], output.shards)
    whole = (tmp_path / "index.json").read_text()
    for damaged in "{}", "", whole[:-1], whole[: len(whole) // 2]:
        (tmp_path / "index.json").write_text(damaged)
        assert not output.is_complete(FIELDS["request"], output.shards)


def test_of_the_index_no_list_is_made_to_see_that_it_is_whole(tmp_path, monkeypatch):
    """Each rank looks at it, and it may have half a gigabyte."""
    shards = ["a", 'b\u00e9 \\ "c"']
    output = OutputSet(tmp_path, shards)
    for shard in shards:
        write(output, shard, [sample(shard)], {})
    output.merge(FIELDS, {})
    assert list(merged_index.merged_shards(tmp_path / "index.json")) == shards
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(str(text)) or loads(text, **options))
    assert output.is_complete(FIELDS["request"], output.shards)
    assert parsed and not any("shards/a/shard.00000.mds" in text for text in parsed)


def test_what_says_that_it_is_done_is_on_the_disk(tmp_path, monkeypatch):
    output, before = OutputSet(tmp_path, ["a"]), on_disk_before_named(monkeypatch)
    output.claim({"x": 1})
    ((options, synced),) = before.items()
    assert synced == {options}
    write(output, "a", [sample("a0")], {"x": 1})
    names = ("shard.00000.mds", "index.json", "rejected.jsonl", "done.json")
    partial = output.partial("a", 0)
    assert before[str(partial)] == {str(partial), *(str(partial / name) for name in names)}


def test_two_ranks_with_one_shard(tmp_path):
    output = OutputSet(tmp_path, ["a"])
    output.claim({"x": 1})
    write(output, "a", [sample("first")], {"x": 1}, rank=0)
    kept = (output.folder("a") / "shard.00000.mds").read_bytes()
    write(output, "a", [sample("second")], {"x": 1}, rank=1)
    assert (output.folder("a") / "shard.00000.mds").read_bytes() == kept
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["a"]


def test_a_shard_that_gets_no_name_stays_where_it_is(tmp_path, monkeypatch):
    output = OutputSet(tmp_path, ["a"])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr("os.rename", fail(OSError(errno.EIO, "Input/output error")))
        write(output, "a", [sample("a0")], {})
    assert (output.partial("a", 0) / "done.json").is_file()


def test_what_killed_ranks_have_left_is_removed_from_finished_shards(tmp_path):
    output = OutputSet(tmp_path, ["a", "b"])
    write(output, "a", [sample("a0")], {})
    for shard, rank, age in ("a", 1, 2 * STALE), ("a", 2, STALE / 2), ("b", 3, 2 * STALE):  # the others may be written
        output.partial(shard, rank).mkdir()
        os.utime(output.partial(shard, rank), times=(time.time() - age,) * 2)
    output.merge(FIELDS, {}, leave_out=["b"])
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["a", "a.tmp-2", "b.tmp-3"]


@pytest.mark.parametrize("moment", ["precompute.output.output_set.to_disk", "os.rename"])
def test_a_rank_that_was_taken_for_lost_while_it_published(tmp_path, monkeypatch, moment):
    """Its disk did not answer for an hour. Another rank has finished the shard meanwhile, and removed its folder."""
    output = OutputSet(tmp_path, ["a"])
    output.claim({})

    def hours_later(folder, *arguments):
        monkeypatch.undo()
        write(output, "a", [sample("a0")], {}, rank=1)
        shutil.rmtree(folder)
        return act(folder, *arguments)

    act = os.rename if moment == "os.rename" else to_disk
    monkeypatch.setattr(moment, hours_later)
    write(output, "a", [sample("a0")], {}, rank=0)
    assert os.listdir(tmp_path / "shards") == ["a"] and output.remaining() == []


def test_a_folder_that_its_rank_removes_while_another_looks_at_its_age(tmp_path, monkeypatch):
    output = OutputSet(tmp_path, ["a"])
    write(output, "a", [sample("a0")], {})
    output.partial("a", 1).mkdir()

    def removed(self, shard):
        output.partial(shard, 1).rmdir()  # as `publish` does, since the shard is done
        return True

    monkeypatch.setattr(OutputSet, "is_done", removed)
    output.remove_stale()
    assert os.listdir(tmp_path / "shards") == ["a"]


def test_what_processes_left_that_were_killed_while_they_wrote_files_of_the_set_is_removed(tmp_path):
    """An index may have half a gigabyte."""
    output = OutputSet(tmp_path, ["a"])
    write(output, "a", [sample("a0")], {})
    files = "index.json", "rejected.jsonl", "manifest.json", "config.yaml", "options.json", "null_text.npy"
    for name in (*(f".{file}.node.1" for file in files), ".index.json.node.2", ".index.json.mine"):
        (tmp_path / name).touch()
        if not name.endswith("2"):  # which another process may be writing
            os.utime(tmp_path / name, times=(time.time() - 2 * STALE,) * 2)
    output.merge(FIELDS, {})
    assert {path.name for path in tmp_path.glob(".*")} == {".index.json.node.2", ".index.json.mine"}


def test_an_index_on_a_file_system_that_maps_no_files(tmp_path, monkeypatch):
    """As that of a pipe does not. The ends of what is read at once lie anywhere."""
    output = OutputSet(tmp_path, ["a", "b", "c"])
    for shard in output.shards:
        write(output, shard, [sample(shard)], {})
    output.merge(FIELDS, {})
    content, pipe = (tmp_path / "index.json").read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)
    for size in 1 << 24, 61, 1:
        monkeypatch.setattr(merged_index, "BLOCK", size, raising=False)
        writing = threading.Thread(target=pipe.write_bytes, args=[content], daemon=True)
        writing.start()
        assert list(merged_index.merged_shards(pipe)) == output.shards
        writing.join()


def test_ranks_look_into_no_folder_while_others_are_missing(tmp_path, monkeypatch):
    """A thousand ranks start and end at the same time, and each would look into a hundred thousand folders."""
    looked = []
    monkeypatch.setattr(OutputSet, "is_encoded", lambda self, shard: looked.append(shard))
    output = OutputSet(tmp_path, ["a", "b", "c"])
    output.claim({"x": 1})
    output.folder("a").mkdir()
    assert not output.is_complete({}, output.shards)
    _finish(None, {"train": output}, Rank(0, 2), {}, {}, {})
    assert looked == []
    output.note_unreadable("b", Problem("broken"))
    output.note_unreadable("c", Problem("broken"))
    _finish(None, {"train": output}, Rank(0, 2), {}, {}, {})
    assert looked == ["a"]


def test_a_folder_without_its_marker_is_replaced(tmp_path):
    output = OutputSet(tmp_path, ["a"])
    output.folder("a").mkdir(parents=True)
    (output.folder("a") / "shard.00000.mds").write_bytes(b"half a copy")
    assert output.remaining() == ["a"]
    write(output, "a", [sample("a0")], {})
    assert output.remaining() == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("shard.00000.mds", b"half a copy", r"shard.00000.mds: damaged \(11 bytes instead of \d+\); delete .*/a and"),
        ("shard.00000.mds", None, r"shard.00000.mds: damaged \(it is missing\)"),
        ("done.json", b"{", "done.json: damaged"),
        ("done.json", b"{}", r"done.json: damaged \(it has no `options`\)"),
        ("rejected.jsonl", None, r"rejected.jsonl: damaged \(it is missing\)"),
        ("index.json", b"[]", r"index.json: damaged \(it is not a JSON object\)"),
        ("index.json", b"[" * 200_000, r"index.json: damaged \(nested too deeply\)"),
    ],
)
def test_a_damaged_shard_does_not_get_into_the_index(tmp_path, name, content, message):
    output = OutputSet(tmp_path, ["a"])
    write(output, "a", [sample("a0")], {"x": 1})
    file = output.folder("a") / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        output.merge({}, {"x": 1})
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("done.json", "samples", "sampmes", r"done.json: damaged \(samples is None\); delete .*/a and start"),
        ("done.json", '"bytes": ', '"bytes": 1', r"/a: damaged \([\d,]+ bytes in index.json, 1[\d,]+ in done.json\)"),
        ("done.json", '"too_small": 1', '"too_small": 3', "1 lines in rejected.jsonl, 3 rejected in done.json"),
        ("done.json", '"reencoded": 0', '"reencoded": "0"', "reencoded is '0'"),
        ("done.json", '"8": 0', '"9": 0', r"done.json: damaged \(upscaled is of 9\)"),
        ("done.json", '"square"', '"squarg"', "latents.8 is {'count"),
        ("done.json", '"options": {', '"options": [], "x": {', r"options is \[\]"),
        ("index.json", "raw_data", "raw_dat`", "file 0 of index.json: raw_data is None"),
        ("index.json", '"samples": 1', '"samples": 2', "2 samples in index.json, 1 in done.json"),
        ("index.json", '"shards": [', '"shards": 3, "x": [', "no list of files but 3"),
        ("rejected.jsonl", "\n", "", "0 lines in rejected.jsonl, 1 rejected in done.json"),
    ],
)
def test_a_changed_byte_of_a_shards_own_files(tmp_path, name, old, new, message):
    """Each was a traceback, or was counted into the manifest."""
    output = OutputSet(tmp_path, ["a"])
    options = {"resolutions": [8]}
    write(output, "a", [sample("a0"), Rejected("a1", "too_small")], options)
    file = output.folder("a") / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        output.merge(FIELDS, options)


def test_an_output_folder_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="out: .*/out/shards cannot be a folder, a file is there; give another"):
        OutputSet(tmp_path / "out", ["a"]).remaining()


def test_damaged_options_cost_no_shard(tmp_path):
    output = OutputSet(tmp_path, ["a"])
    output.claim({"x": 1})
    write(output, "a", [sample("a0")], {"x": 1})
    (tmp_path / "options.json").write_text("")
    with pytest.raises(ValueError, match="options.json: damaged .*; delete .*/options.json and start the job again"):
        output.claim({"x": 1})
    (tmp_path / "options.json").unlink()
    output.claim({"x": 1})
    assert output.remaining() == []


def test_claims(tmp_path):
    output = OutputSet(tmp_path, ["a", "b"])
    output.claim({"resolutions": [8], "crop": "center"})
    output.claim({"resolutions": (8,), "crop": "center"})
    with pytest.raises(ValueError, match=r"made with resolutions \[8\], this job has \[16\]; give another `out`"):
        output.claim({"resolutions": [16], "crop": "center"})
    with pytest.raises(ValueError, match="made with crop center, this job has None"):
        output.claim({"resolutions": [8]})
    # A shard with other options does not get into the index.
    write(output, "a", [sample("a0")], {"resolutions": [8], "crop": "center"})
    write(output, "b", [sample("b0")], {"resolutions": [8], "crop": "random"})
    with pytest.raises(ValueError, match="made with crop random"):
        output.merge({}, {"resolutions": [8], "crop": "center"})
    assert not (tmp_path / "index.json").exists()


def test_keys_of_encoders_of_other_packages_are_options(tmp_path, recipe):
    """Shards after another value of a key, which is not in the weights, were mixed with those before it."""
    config = load_config(recipe(), [], EncodeConfig, missing=[])
    assert "image_encoder" not in config.options() and "text_encoder" not in config.options()
    folder = config.image_encoder.args["path"]

    def claim(**arguments):
        config.image_encoder = replace(config.image_encoder, name="my-package.mine", args=arguments)
        OutputSet(tmp_path / "set", []).claim(config.options())

    claim(path=folder, slicing=True)
    claim(path="moved", slicing=True)
    with pytest.raises(ValueError, match="made with image_encoder .*True.*, this job has .*False"):
        claim(path=folder)
    earlier = {name: value for name, value in config.options().items() if name != "image_encoder"}
    (tmp_path / "set" / "options.json").write_text(json.dumps(earlier))  # of an earlier version
    claim(path=folder)


def test_what_is_taken_of_a_source_is_an_option_wherever_it_lies(tmp_path, recipe):
    def source(**arguments):
        return reading(load_config(recipe(sources={"a": arguments}), [], EncodeConfig, missing=[]).sources["a"])

    folder = source(name="folder", path="a", captions="a/texts.csv", shard_size=7)
    assert folder == source(name="folder", path="b", captions="b/texts.csv")
    assert folder != source(name="folder", path="a") == source(name="folder", path="a", captions="txt")
    inner = {"name": "tars", "urls": "a.tar"}
    scored = [source(name="scored", source=inner, scores="s", at_least=least) for least in (0.2, 0.3)]
    OutputSet(tmp_path, []).claim({"source": scored[0]})
    with pytest.raises(ValueError, match="made with source .*0.2.*, this job has .*0.3"):
        OutputSet(tmp_path, []).claim({"source": scored[1]})
    (tmp_path / "options.json").write_text("{}")  # of an earlier version
    OutputSet(tmp_path, []).claim({"source": scored[1]})


def test_scores_may_move_but_not_be_another_models(tmp_path, recipe):
    def options(scores):
        inner = {"name": "tars", "urls": "a.tar"}
        source = {"name": "scored", "source": inner, "scores": str(tmp_path / scores), "at_least": 0.2}
        twice = source | {"source": source}  # of pairs that were chosen by scores, too
        config = load_config(recipe(sources={"once": source, "twice": twice}), [], EncodeConfig, missing=[])
        return [source_options(component) for component in config.sources.values()]

    for folder, weights in ("a", "1"), ("moved", "1"), ("other", "2"):
        write_json(tmp_path / folder / "facts.json", {"weights_hash": weights})
    assert options("a") == options("moved")
    for known, other in zip(options("a"), options("other"), strict=True):
        output = OutputSet(tmp_path / str(len(known["scores"])), [])
        output.claim(known)
        with pytest.raises(ValueError, match=r"made with scores \['1'.*\], this job has \['2'.*\]; give another `out`"):
            output.claim(other)
    (output.out / "options.json").write_text(json.dumps({"source": known["source"]}))  # of an earlier version
    output.claim(other)
    with pytest.raises(FileNotFoundError, match="no file .*/none/facts.json; finish precompute/scores.py first"):
        options("none")


def test_a_list_of_shared_images_may_move_but_not_change(tmp_path, recipe):
    def options(name):
        inner = {"name": "tars", "urls": "a.tar"}
        source = {"name": "unshared", "source": inner, "shared": str(tmp_path / name)}
        config = load_config(recipe(sources={"a": source}), [], EncodeConfig, missing=[])
        return source_options(config.sources["a"])

    for name, threshold in ("a.json", 0.9), ("moved.json", 0.9), ("other.json", 0.95):
        write_json(tmp_path / name, {"threshold": threshold, "pairs": []})
    assert options("a.json") == options("moved.json")
    output = OutputSet(tmp_path / "out", [])
    output.claim(options("a.json"))
    with pytest.raises(ValueError, match=r"made with scores \['.*'\], this job has \['.*'\]; give another `out`"):
        output.claim(options("other.json"))
    with pytest.raises(FileNotFoundError, match="no file .*/none.json; make it with precompute/scores.py --shared"):
        options("none.json")


def test_of_two_ranks_that_claim_at_the_same_moment_one_is_refused(tmp_path, monkeypatch):
    other = tmp_path / "options.json"
    monkeypatch.setattr("precompute.output.output_set.to_disk", lambda path: other.write_text('{"x": 1}'))
    with pytest.raises(ValueError, match="made with x 1, this job has 2"):
        OutputSet(tmp_path, []).claim({"x": 2})


def test_a_claim_without_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", fail(PermissionError("no links here")))
    OutputSet(tmp_path, []).claim({"x": 1})
    with pytest.raises(ValueError, match="made with x 1"):
        OutputSet(tmp_path, []).claim({"x": 2})
