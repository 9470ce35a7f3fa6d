"""The work of an evaluation gives the same numbers whoever does it, and is done once."""

import errno
import zlib
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from data.system.errors import WrongResult
from data.system.ranks import Rank
from recipes.evaluation.command import describe
from recipes.evaluation.config import Evaluation, Reference, Rerank
from recipes.evaluation.job import NAMED, POLL, Job
from recipes.evaluation.variants import variants

CAPTIONS = [f"caption {i}" for i in range(11)]


class Pipeline:
    """Images that depend on caption, seed and options alone; it counts them, and notes the captions of each call."""

    resolution = 4

    def __init__(self):
        self.drawn = 0
        self.calls = []

    def generate(self, captions, *, seeds, batch, guidance=1.0):
        self.drawn += len(captions)
        self.calls.append(captions)
        states = [(zlib.crc32(caption.encode()), seed) for caption, seed in zip(captions, seeds, strict=True)]
        draws = [np.random.default_rng([*state, int(guidance)]) for state in states]
        return np.stack([draw.integers(0, 256, (4, 4, 3), dtype=np.uint8) for draw in draws])


def mean(images):
    return {"features": images.reshape(len(images), -1).astype(np.float32)[:, :5]}


SCORER = SimpleNamespace(scores=lambda captions, images: images.reshape(len(images), -1).mean(1).astype(np.float32))
CLIP = SimpleNamespace(scores=lambda captions, images: -SCORER.scores(captions, images))  # what it scores is not chosen


@pytest.fixture
def job(tmp_path):
    def make(folder="work", **changes):
        values = {"sweeps": {"guidance": [1, 4]}, "blur": [0, 1], "chunk": 4, "seed": 5} | changes
        config = Evaluation(out="x", reference=Reference(source=None), rerank=Rerank(by="x", pools=[4, 1, 2]), **values)
        pipeline = Pipeline()
        return Job(config, CAPTIONS, pipeline, mean, CLIP, SCORER, {"network": "abc"}, tmp_path / folder)

    return make


def collected(job):
    return {variant.name: job.collect(variant) for variant in variants(job.config)}


def same(one, other):
    for name, labels in one.items():
        for label, arrays in labels.items():
            for kind, array in arrays.items():
                assert np.array_equal(array, other[name][label][kind]), (name, label, kind)
    return True


def test_results_do_not_depend_on_the_ranks_or_the_batch(job):
    alone = job("alone")
    alone.run(Rank())
    many = job("many", batch=3)
    for rank in (2, 0, 1):
        many.run(Rank(rank, 3))
    other = job("chunks", chunk=11)
    other.run(Rank())
    found = collected(alone)
    assert list(found) == ["sampling", "guidance=1", "guidance=4", "rerank"]
    assert found["sampling"][0]["features"].shape == (11, 5) and list(found["sampling"]) == [0, 1]
    assert same(found, collected(many)) and same(found, collected(other))
    assert not np.array_equal(found["guidance=1"][0]["features"], found["guidance=4"][0]["features"])


def test_finished_work_is_not_done_again(job):
    first = job()
    first.run(Rank())
    number = len(first.captions)
    assert first.pipeline.drawn == number * (1 + 2 + 4)
    again = job()
    again.run(Rank())
    assert again.pipeline.drawn == 0
    variant = variants(first.config)[0]
    first.file(variant, 8).unlink()
    again.run(Rank())
    assert again.pipeline.drawn == 3  # the last chunk of the plain sampling
    # Other weights, seeds or options are other work.
    for changed in (job(seed=6), job(sampling={"guidance": 2.0})):
        assert changed.file(variants(changed.config)[0], 0) != first.file(variant, 0)
    changed = job()
    changed.identity["network"] = "other"
    assert changed.file(variant, 0) != first.file(variant, 0)
    changed = job()
    changed.captions = [*CAPTIONS[:4], "another", *CAPTIONS[5:]]  # in the second chunk
    assert changed.file(variant, 0) == first.file(variant, 0) and changed.file(variant, 4) != first.file(variant, 4)
    changed.captions = CAPTIONS[:-1]  # the seeds of further candidates are counted from there
    assert changed.file(variant, 0) != first.file(variant, 0)
    changed.captions = [*CAPTIONS[:4], *CAPTIONS[:4]]  # the images of the second chunk have other seeds
    assert changed.file(variant, 0) != changed.file(variant, 4)
    for other in (replace(variant, radii=(0, 2)), replace(variant, pools=(1, 2))):
        assert first.file(other, 0) != first.file(variant, 0)


def test_what_two_variants_have_in_common_is_drawn_once(job):
    """A sweep usually contains the value of the sampling. Ranks that draw at the same time do not see each other's."""
    changes = {"sampling": {"guidance": 4}, "sweeps": {"guidance": [1, 4, 1]}, "blur": [0]}
    ranks = [job(f"rank{rank}", **changes) for rank in range(3)]
    for number, one in enumerate(ranks):
        one.run(Rank(number, 3))
    assert sum(one.pipeline.drawn for one in ranks) == len(CAPTIONS) * (2 + 4)
    assert "6 images per caption" in describe(ranks[0].config)
    alone = job(**changes)
    alone.run(Rank())
    found = collected(alone)
    assert same({"sampling": found["sampling"]}, {"sampling": found["guidance=4"]})
    other = job("other", **changes | {"sweeps": {"guidance": [4.0]}})  # which has files of its own
    other.run(Rank())
    assert same({"sampling": found["sampling"]}, {"sampling": collected(other)["guidance=4.0"]})


@pytest.mark.parametrize("change", [lambda images: images[1:], lambda images: images / np.float32(255)])
def test_images_that_a_pipeline_does_not_draw_right_are_not_measured(job, change):
    """Features of fewer images, or of images from 0 to 1, gave figures like others."""
    one = job()
    generate = one.pipeline.generate
    one.pipeline.generate = lambda *captions, **options: change(generate(*captions, **options))
    with pytest.raises(WrongResult, match=r"^generate\(\) of the pipeline returns an array .* for 4 captions; retu"):
        one.run(Rank())


def test_images_of_another_size_than_the_reference_gets_are_not_measured(job):
    one = job()
    one.pipeline.resolution = 8
    with pytest.raises(WrongResult, match=r"^generate\(\) .* images of 4 x 4 pixels, and its `resolution` is 8, "):
        one.run(Rank())


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data.replace(b"<f4", b"<f5"), lambda _: b""])
def test_a_damaged_chunk_is_named(job, change):
    done = job()
    done.run(Rank())
    file = done.file(variants(done.config)[0], 4)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=f"^{file}: damaged .*; delete it and start the same command again$"):
        collected(done)
    file.unlink()
    done.run(Rank())
    assert collected(done)


def test_a_chunk_that_the_disk_does_not_give_is_not_said_to_be_damaged(job, monkeypatch):
    """Its user would delete what took hours to compute."""
    done = job()
    done.run(Rank())
    monkeypatch.setattr(np, "load", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(OSError, match="Stale file handle") as error:
        collected(done)
    assert error.value.filename == str(done.file(variants(done.config)[0], 0))


def test_null_is_the_default_of_an_option(job):
    found = variants(job(sampling={"guidance": 2.0, "steps": None}, sweeps={"guidance": [None, 4]}).config)
    assert [variant.options for variant in found] == [{"guidance": 2.0}, {}, {"guidance": 4}, {"guidance": 2.0}]


def test_a_wrong_value_of_a_sweep_is_met_before_much_is_drawn(job):
    wrong = job(sweeps={"guidance": [1, 4, "wrong"]})
    with pytest.raises(ValueError, match="wrong"):
        wrong.run(Rank())
    assert wrong.pipeline.drawn == 4 * 4  # a chunk of each variant, the wrong one's last


def test_a_wait_for_other_ranks_is_named(job, monkeypatch, capsys):
    ours = job()
    ours.run(Rank(0, 3))
    sleeps = []

    def sleep(seconds):  # the other ranks do their shares only after the wait was named
        sleeps.append(seconds)
        if "waiting for 8 chunks" in capsys.readouterr().out:  # of 3 for each of 4 variants
            ours.run(Rank(1, 3))
            ours.run(Rank(2, 3))

    monkeypatch.setattr("recipes.evaluation.job.time.sleep", sleep)
    assert len(collected(ours)) == 4
    assert NAMED <= sum(sleeps) < NAMED + 2 * POLL


def test_the_best_of_a_pool(job):
    done = job()
    done.run(Rank())
    pools = done.collect(variants(done.config)[-1])
    assert list(pools) == [1, 2, 4]
    candidates = np.stack(
        [Pipeline().generate(CAPTIONS, seeds=[5 + i + 11 * k for i in range(11)], batch=1) for k in range(4)]
    )  # (4, 11, 4, 4, 3)
    scores = candidates.reshape(4, 11, -1).mean(2)
    for size, arrays in pools.items():
        best = scores[:size].argmax(0)
        known = mean(candidates[best, np.arange(11)])["features"]
        assert np.array_equal(arrays["features"], known), size
    assert (pools[4]["scores"] <= pools[1]["scores"]).all() and (pools[4]["scores"] != pools[1]["scores"]).any()
    plain = done.collect(variants(done.config)[0])
    assert np.array_equal(pools[1]["features"], plain[0]["features"])
    # A text is computed once for its candidates, as many as a batch takes, if they are side by side.
    side_by_side = [caption for caption in CAPTIONS[8:] for _ in range(3)]
    small = job("small", batch=3)
    small.run(Rank())
    assert small.pipeline.calls[-2:] == [side_by_side, CAPTIONS[8:]]
