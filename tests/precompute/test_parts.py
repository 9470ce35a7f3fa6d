"""The parts of the encode job that need no encoder: ranks, output folder, writer, progress."""

import errno
import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from streaming import StreamingDataset
from torch.utils.data import DataLoader

from data.files import write_json
from data.log import every_rank, log
from data.manifest import Manifest
from data.ranks import Rank
from data.sources.base import InputShard, Position, Rejected
from precompute import upload
from precompute.batch import DecodedBatch, ShardEnd
from precompute.columns import LatentColumns
from precompute.config import EncodeConfig, reading, source_options
from precompute.decode import DecodedBatches, assign, batches
from precompute.job import _finish
from precompute.merged_index import merged_shards
from precompute.output import STALE, OutputSet
from precompute.pipeline import EncodePipeline
from precompute.progress import EncodeProgress, duration
from precompute.upload import Copy, Uploads
from precompute.writer import EncodedSample, ShardWriter, Storage
from recipes.config.recipe import load_config
from tests.disks import on_disk_before_named

COLUMNS = LatentColumns({8: (2, 4, 4)}, (3, 5))
# What a manifest says that is not counted from the shards.
FIELDS = {
    "image_encoder": {"weights_hash": "", "channels": 2, "downsample": 2, "scaling_factor": 1.0, "shift_factor": 0.0},
    "text_encoder": {"weights_hash": "", "length": 1, "width": 1, "tokenizer": ""},
    "resolutions": [8], "crop": "center", "upscale": False, "seed": 1, "filter": {}, "columns": {}, "software": {},
    "dtype": "float16", "normalisation": "", "caption_policy": "", "request": {"text_encoder": None},
}  # fmt: skip


def sample(key: str, value: float = 1.0) -> EncodedSample:
    latent = np.full((2, 4, 4), value, dtype=np.float16)
    row = {
        "key": key, "caption": "c", "width": 9, "height": 8, "crop_8": np.arange(4, dtype=np.int32),
        "mean_8": latent, "std_8": latent, "text": np.zeros((3, 5), np.float16),
    }  # fmt: skip
    sums = np.stack([latent.sum((1, 2)), (latent**2).sum((1, 2)), (latent**2).sum((1, 2))]).astype(float)
    return EncodedSample(row, {8: sums})


def write(output: OutputSet, shard: str, samples: list, options: dict, rank: int = 0) -> None:
    writer = ShardWriter(output.partial(shard, rank), shard, COLUMNS, Storage(), options)
    for number in reversed(range(len(samples))):
        writer.add(number, samples[number])
    writer.end(len(samples))
    assert writer.complete
    writer.finish()
    output.publish(shard, rank)
    if (files := output.to_upload(shard)) is not None:
        output.copy.add(Path(files["folder"]), files["place"], files["names"])


def fail(error: Exception):
    """A function that raises an error."""

    def act(*arguments):
        raise error

    return act


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_shard_goes_to_one_rank(world):
    items = list(range(20))
    shares = [Rank(rank, world).share(items) for rank in range(world)]
    assert sorted(sum(shares, [])) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("shards", "workers"), [(0, 3), (1, 1), (1, 4), (2, 5), (3, 3), (10, 3)])
def test_every_sample_goes_to_one_worker(shards, workers):
    jobs = [InputShard("train", str(i)) for i in range(shards)]
    taken = [
        (job, number)
        for worker in range(workers)
        for job, part, parts in assign(jobs, worker, workers)
        for number in range(part, 10, parts)
    ]
    assert len(taken) == len(set(taken)) == 10 * shards


def test_an_interrupt_waits_until_all_workers_are_forked(monkeypatch):
    begun = []

    def begin(loader):
        signal.raise_signal(signal.SIGINT)
        begun.append(loader)
        return iter([])

    monkeypatch.setattr(DataLoader, "__iter__", begin)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(batches(DecodedBatches([], {}, None), workers=0, prefetch=2, pin=False))
        assert len(begun) == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup does
        assert list(batches(DecodedBatches([], {}, None), workers=0, prefetch=2, pin=False)) == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Rank.from_environment() == Rank(0, 1, 0)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE is 'many'"):
        Rank.from_environment()


def test_writer_keeps_the_source_order(tmp_path):
    output = OutputSet(tmp_path, ["a", "b", "empty"])
    output.claim({"x": 1})
    write(output, "b", [sample("b0", 3.0)], {"x": 1})
    write(output, "a", [sample("a0"), Rejected("a1", "broken_image", "why"), sample("a2")], {"x": 1})
    assert output.remaining() == ["empty"] and not output.is_complete({})
    write(output, "empty", [Rejected("e0", "empty_caption")], {"x": 1})
    manifest = output.merge(FIELDS | {"request": {"r": [8]}}, {"x": 1})
    assert (manifest.samples, manifest.rejected) == (3, {"broken_image": 1, "empty_caption": 1})
    assert manifest.latents["8"]["mean"] == [pytest.approx(5 / 3)] * 2
    assert manifest.latents["8"]["sample_std"] == [pytest.approx((8 / 9 + 11 / 3) ** 0.5)] * 2
    dataset = StreamingDataset(local=str(tmp_path), batch_size=1, shuffle=False)
    assert [dataset[i]["key"] for i in range(3)] == ["a0", "a2", "b0"]
    lines = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert lines[0] == {"key": "a1", "shard": "a", "reason": "broken_image", "detail": "why"}
    assert not output.is_complete({"r": [8]})  # the null caption's embedding is not there
    (tmp_path / "null_text.npy").write_bytes(b"")
    assert output.is_complete({"r": [8]}) and output.is_complete({"r": (8,)}) and not output.is_complete({"r": [9]})
    assert not OutputSet(tmp_path, ["a", "b"]).is_complete({"r": [8]})
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
    assert output.is_complete(FIELDS["request"])
    write(OutputSet(tmp_path, [], copy), "b", [sample("b0")], {})
    output = OutputSet(tmp_path, ["a", "b"], copy)
    with monkeypatch.context() as patch:
        if uploads:
            patch.setattr(Copy, "add", fail(ValueError("try again")))
            with pytest.raises(ValueError, match="try again"):
                output.merge(FIELDS, {})
        else:
            OutputSet(tmp_path, ["a", "b"]).merge(FIELDS, {})
    assert Manifest.read(tmp_path).shards == 2 and not output.is_complete(FIELDS["request"])
    output.merge(FIELDS, {})
    assert output.is_complete(FIELDS["request"])


def test_as_many_other_shards_are_not_the_set(tmp_path):
    every = {"a": [sample("a0")], "b": [sample("b0")], "empty": [Rejected("e0", "empty_caption")]}
    for shard, samples in every.items():
        write(OutputSet(tmp_path, []), shard, samples, {})
    for shards in ["a", "b"], ["a", "empty"], ["b", "a"]:
        output = OutputSet(tmp_path, shards)
        assert not output.is_complete(FIELDS["request"])
        output.merge(FIELDS, {})
        assert output.is_complete(FIELDS["request"])
    whole = (tmp_path / "index.json").read_text()
    for damaged in "{}", "", whole[:-1], whole[: len(whole) // 2]:
        (tmp_path / "index.json").write_text(damaged)
        assert not output.is_complete(FIELDS["request"])


def test_of_the_index_no_list_is_made_to_see_that_it_is_whole(tmp_path, monkeypatch):
    """Each rank looks at it, and it may have half a gigabyte."""
    shards = ["a", 'b\u00e9 \\ "c"']
    output = OutputSet(tmp_path, shards)
    for shard in shards:
        write(output, shard, [sample(shard)], {})
    output.merge(FIELDS, {})
    assert list(merged_shards(tmp_path / "index.json")) == shards
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(str(text)) or loads(text, **options))
    assert output.is_complete(FIELDS["request"])
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


def test_ranks_look_into_no_folder_while_others_are_missing(tmp_path, monkeypatch):
    """A thousand ranks start and end at the same time, and each would look into a hundred thousand folders."""
    looked = []
    monkeypatch.setattr(OutputSet, "is_encoded", lambda self, shard: looked.append(shard))
    output = OutputSet(tmp_path, ["a", "b", "c"])
    output.claim({"x": 1})
    output.folder("a").mkdir()
    assert not output.is_complete({})
    _finish(None, {"train": output}, Rank(0, 2), {}, {}, {})
    assert looked == []
    output.note_unreadable("b", "broken")
    output.note_unreadable("c", "broken")
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


def test_a_shard_is_complete_when_all_its_parts_were_read(tmp_path):
    def writer(name: str) -> ShardWriter:
        return ShardWriter(tmp_path / name, name, COLUMNS, Storage(), {})

    whole = writer("whole")
    whole.add(0, sample("0"))
    whole.end(1, parts=2)
    assert not whole.complete
    whole.end(1, parts=2)
    assert whole.complete
    torn = writer("torn")
    torn.end(1, parts=2)
    with pytest.raises(ValueError, match="one process read samples up to number 1, another up to number 2"):
        torn.end(2, parts=2)


def test_after_an_error_of_the_writer_nothing_more_is_encoded():
    position = Position(InputShard("train", "a"), 0)
    rejected = [(position, Rejected("k", "broken_image"))]
    source = iter([DecodedBatch({}, torch.empty(0), [], rejected) for _ in range(100)])
    progress = EncodeProgress(1, out=io.StringIO())
    with pytest.raises(OSError, match="No space left"):
        EncodePipeline(None, None, fail(OSError(errno.ENOSPC, "No space left")), print, progress).run(source)
    assert len(list(source)) > 50


def test_encoders_do_not_wait_for_shards_that_are_complete_together(tmp_path):
    shards, read = [InputShard("train", str(number)) for number in range(12)], threading.Event()

    def source():
        for shard in shards:
            rejected = [(Position(shard, 0), Rejected("k", "broken_image"))]
            yield DecodedBatch({}, torch.empty(0), [], rejected, [ShardEnd(shard, 1, 1)])
        read.set()

    def open_writer(shard):
        return ShardWriter(tmp_path / shard.shard, shard.shard, COLUMNS, Storage(), {})

    def publish(shard):
        published.append(shard if read.wait(60) else "the encoders waited")

    published = []
    EncodePipeline(None, None, open_writer, publish, EncodeProgress(12, quiet=True)).run(source())
    assert published == shards


class InThisProcess:
    """In place of the process that uploads: tasks are functions."""

    killed = False

    def __init__(self, script):
        assert script.is_file()

    def start(self):
        pass

    def do(self, task):
        task()

    def end(self):
        pass

    def kill(self):
        self.killed = True


def test_uploads_go_on_beside_the_job(monkeypatch):
    """In order, all before the context ends. After an error no other one begins, and who adds the next one is told."""
    monkeypatch.setattr(upload, "HelperProcess", InThisProcess)
    done, may_go = [], threading.Event()
    with Uploads() as uploads:
        uploads.add(lambda: may_go.wait(60) and done.append(0))
        uploads.add(lambda: done.append(1))
        assert not done  # `add` has not waited for the first one
        may_go.set()
    assert done == [0, 1]

    def fail():
        raise ValueError("the store is gone")

    with pytest.raises(ValueError, match="the store is gone"), Uploads() as uploads:
        uploads.add(fail)
        uploads.add(lambda: done.append(2))
    with pytest.raises(ValueError, match="the store is gone"), Uploads() as uploads:
        uploads.add(fail)
        while True:
            uploads.add(lambda: done.append(3))

    def until_the_next_is_cancelled():
        while not uploads._begun[1].cancelled():
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt), Uploads() as uploads:
        may_go.clear()
        uploads.add(lambda: may_go.wait(60) and until_the_next_is_cancelled())
        uploads.add(lambda: done.append(4))
        may_go.set()
        raise KeyboardInterrupt
    may_go.clear()
    with pytest.raises(KeyboardInterrupt), Uploads() as uploads:  # that comes while the context waits
        shutdown = uploads._thread.shutdown

        def interrupted(**options):
            uploads._thread.shutdown = shutdown
            raise KeyboardInterrupt

        uploads._thread.shutdown = interrupted
        uploads.add(lambda: may_go.wait(60) and until_the_next_is_cancelled())
        uploads.add(lambda: done.append(5))
    assert uploads._begun[1].cancelled() and uploads._process.killed
    may_go.set()
    assert done == [0, 1]


def test_every_rank_speaks_of_its_own_part(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    log.info("of the whole job")
    every_rank.info("of this rank")
    assert capsys.readouterr().out == "of this rank\n"


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


def test_of_two_ranks_that_claim_at_the_same_moment_one_is_refused(tmp_path, monkeypatch):
    other = tmp_path / "options.json"
    monkeypatch.setattr("precompute.output.to_disk", lambda path: other.write_text('{"x": 1}'))
    with pytest.raises(ValueError, match="made with x 1, this job has 2"):
        OutputSet(tmp_path, []).claim({"x": 2})


def test_a_claim_without_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", fail(PermissionError("no links here")))
    OutputSet(tmp_path, []).claim({"x": 1})
    with pytest.raises(ValueError, match="made with x 1"):
        OutputSet(tmp_path, []).claim({"x": 2})


def test_sizes_of_stable_diffusion_2():
    columns = LatentColumns({256: (4, 32, 32), 512: (4, 64, 64)}, (77, 1024))
    assert sum(columns.bytes_by_part().values()) == 2 * 2 * 4 * (32**2 + 64**2) + 2 * 77 * 1024 + 2 * 16 + 16
    assert columns.encodings()["mean_512"] == "ndarray:float16:4,64,64"


def test_progress(monkeypatch):
    now = iter([0.0, 5.0, 11.0, 20.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now, 20.0))
    out = io.StringIO()
    progress = EncodeProgress(shards=4, out=out)
    progress.update(50, 0)
    assert out.getvalue() == ""  # not yet ten seconds
    progress.update(45, 5)
    assert "95 images, shard 1/4" in out.getvalue() and "ETA ?" in out.getvalue()
    progress.shard_done(100)
    assert progress.line() == "encode: 95 images, shard 2/4, 4.8 images/s, ETA 1:00"
    assert [duration(s) for s in (9.6, 61, 3725)] == ["10s", "1:01", "1:02:05"]
