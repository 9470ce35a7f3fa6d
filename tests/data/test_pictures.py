"""Raw pictures from sources: each once a pass, on one worker of one rank, in an order that the seed gives."""

import errno
import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from data.loading import Placement
from data.pictures import pictures
from data.sources.base import Rejected, Sample
from data.sources.filters import Filter
from data.system.errors import Outage
from data.tokenizers.clip_library import open_clip


class Numbered:
    """A source of pictures whose every pixel is their number; the left half is bright in the blue channel."""

    def __init__(self, shards, each, reject=()):
        self.names = [f"shard{i}" for i in range(shards)]
        self.each = each
        self.reject = set(reject)
        self.reads = Counter()

    def shards(self):
        return self.names

    def read(self, shard):
        self.reads[shard] += 1
        first = self.names.index(shard) * self.each
        for number in range(first, first + self.each):
            if number in self.reject:
                yield Rejected(f"{number}", "broken_image", "")
                continue
            pixels = np.full((8, 8, 3), number, dtype=np.uint8)
            pixels[:, :4, 2], pixels[:, 4:, 2] = 255, 0
            yield Sample(f"{number}", Image.fromarray(pixels), f"picture of {number}")


def load(source, batch=4, training=True, rank=0, world=1, seed=17, **arguments):
    arguments = {"resolution": 8, "workers": 0, "shuffle_buffer": 16, **arguments}
    return pictures(Placement(batch, training, rank, world, seed), {}, source=source, **arguments).loader


def numbers(batch):
    return batch["image"][:, 0, 0, 0].tolist()


def take(loader, batches):
    return [n for batch in itertools.islice(iter(loader), batches) for n in numbers(batch)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("buffer", [1, 16, 1000])
def test_every_picture_once_a_pass_in_another_order(buffer, keep):
    source = Numbered(3, 8)
    found = take(load(source, shuffle_buffer=buffer, keep_decoded=keep), 18)
    passes = [found[:24], found[24:48], found[48:]]
    assert all(sorted(one) == list(range(24)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0] and passes[0] != list(range(24))
    assert set(source.reads.values()) == {1} if keep else min(source.reads.values()) >= 3


def test_a_shard_without_a_picture_costs_a_part_no_more_than_a_pass():
    """It is dealt to another part in each pass, and may be all that a part has."""
    order = [take(load(Numbered(3, 4, reject=range(4)), rank=rank, world=3, batch=2), 24) for rank in range(3)]
    assert all(set(found) == set(range(4, 12)) for found in order)


@pytest.mark.parametrize("shards", [1, 8])  # dealt to the workers by sample, and by shard
def test_ranks_and_workers_share_a_pass(shards):
    whole = []
    for rank in range(2):
        source = Numbered(shards, 24 // shards)
        # Two workers take turns at batches of 3; six pictures are each worker's pass.
        found = take(load(source, batch=3, rank=rank, world=2, workers=2), 8)
        whole += found[:12]
    assert sorted(whole) == list(range(24))


def test_pictures_that_are_kept_are_drawn_equally_often_on_all_ranks():
    """Of three shards on two ranks, one would have two for good."""
    parts = [take(load(Numbered(3, 8), rank=rank, world=2, keep_decoded=True), 12) for rank in range(2)]
    assert Counter(parts[0] + parts[1]) == dict.fromkeys(range(24), 4)


def test_more_readers_than_shards_are_told_that_each_reads_them_all(capsys):
    for world in (2, 3):
        source = Numbered(2, 6)
        loader = load(source, batch=2, world=world, shuffle_buffer=0)
        told = "share 2 shards, so each worker reads all of them" in capsys.readouterr().out
        take(loader, 12 // world // 2)
        assert told == (world > 2) == (len(source.reads) == 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_seed_gives_the_order(workers):
    def order(seed):
        return take(load(Numbered(4, 6), seed=seed, workers=workers), 12)

    assert order(1) == order(1) != order(2)


def test_a_source_keeps_its_own_order_of_shards():
    source = Numbered(8, 3)
    take(load(source), 12)
    assert source.shards() == Numbered(8, 3).shards()


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_leaves_the_noise_as_it_is(workers):
    training = load(Numbered(2, 8), flip=0.5, workers=workers)
    validation = load(Numbered(2, 8), training=False)
    state = torch.get_rng_state()
    take(training, 4), take(validation, 4)
    assert (torch.get_rng_state() == state).all()


def test_tokens_are_open_clips(monkeypatch):
    loader, tokenizer = load(Numbered(1, 8), tokens=10), open_clip.SimpleTokenizer(context_length=10)
    monkeypatch.delattr(open_clip, "SimpleTokenizer")  # it is there before workers are, each of which would import it
    for batch in itertools.islice(loader, 4):
        captions = [f"picture of {number}" for number in numbers(batch)]
        assert batch["tokens"].dtype == torch.int64 and batch["image"].dtype == torch.uint8
        assert (batch["tokens"] == tokenizer(captions)).all()
    assert "tokens" not in next(iter(load(Numbered(1, 8))))


@pytest.mark.parametrize("keep", [False, True])
def test_words_are_left_out_in_training_alone(keep):
    tokenizer = open_clip.SimpleTokenizer(context_length=10)
    lengths, words = Counter(), ["picture", "of", "7"]
    subsets = [" ".join(kept) for count in (1, 2, 3) for kept in itertools.combinations(words, count)]
    possible = {tuple(tokenizer([text])[0].tolist()) for text in subsets}
    loader = load(Numbered(1, 8), tokens=10, word_dropout=0.5, keep_decoded=keep)
    for batch in itertools.islice(loader, 80):
        for number, tokens in zip(numbers(batch), batch["tokens"].tolist(), strict=True):
            if number == 7:
                assert tuple(tokens) in possible
                lengths[sum(token != 0 for token in tokens) - 2] += 1  # without the marks of begin and end
    assert set(lengths) == {1, 2, 3} and lengths[3] < 15  # 5 of 40 are whole on average
    (batch,) = load(Numbered(1, 4), tokens=10, word_dropout=1.0, training=False)
    assert (batch["tokens"] == tokenizer([f"picture of {n}" for n in range(4)])).all()
    with pytest.raises(ValueError, match="word_dropout is a share from 0 to 1, got 1.5"):
        load(Numbered(1, 4), tokens=10, word_dropout=1.5)


@pytest.mark.parametrize("keep", [False, True])
def test_pictures_are_mirrored(keep):
    bright = [
        (image[2, 0, 0] == 255, image[2, 0, -1] == 255)
        for batch in itertools.islice(load(Numbered(4, 25), batch=20, flip=0.25, keep_decoded=keep), 40)
        for image in batch["image"]
    ]
    counts = Counter((bool(left), bool(right)) for left, right in bright)
    assert set(counts) == {(True, False), (False, True)} and 0.2 < counts[False, True] / 800 < 0.3
    plain = next(iter(load(Numbered(4, 25), batch=20)))["image"]
    assert (plain[:, 2, 0, 0] == 255).all() and plain.shape == (20, 3, 8, 8)


def test_decoded_pictures_are_kept():
    source = Numbered(2, 6)
    batches = itertools.islice(load(source, keep_decoded=True, tokens=10), 9)
    rows = [row for batch in batches for row in zip(numbers(batch), batch["tokens"][:, 3].tolist(), strict=True)]
    assert sum(source.reads.values()) == 2
    assert set(rows[:12]) == set(rows[12:24]) == set(rows[24:]) and len(set(rows[:12])) == 12
    with pytest.raises(ValueError, match="keep_decoded holds one crop per image and needs crop: center"):
        load(source, keep_decoded=True, crop="random")


def test_random_crops_differ():
    def crops(training):
        loader = load(Wide(), batch=30, crop="random", training=training, resolution=8)
        return {int(image[0, 0, 0]) for image in next(iter(loader))["image"]}

    assert len(crops(True)) > 5 and len(crops(False)) == 1


def test_dalles_crops_vary_in_size_and_place():
    for crop in ("dvae", "transformer"):
        training, validation = (
            next(iter(load(Wide(), batch=30, crop=crop, training=training, resolution=6)))["image"]
            for training in (True, False)
        )
        spans = training[:, 0, 0, -1].int() - training[:, 0, 0, 0].int()
        assert len((spans // 4).unique()) > 1 and len(training[:, 0, 0, 0].unique()) > 2
        assert len(validation[:, 0, 0, 0].unique()) == 1
    assert all((one == other).all() for one, other in zip(*(first_batches() for _ in range(2)), strict=True))


def first_batches():
    return [batch["image"] for batch in itertools.islice(load(Wide(), crop="dvae", flip=0.5, resolution=6), 4)]


class Wide(Numbered):
    """One picture 40 wide, brighter to the right, many times."""

    def __init__(self):
        super().__init__(1, 30)

    def read(self, shard):
        ramp = np.tile(np.arange(40, dtype=np.uint8)[None, :, None] * 6, (8, 1, 3))
        for number in range(30):
            yield Sample(f"{number}", Image.fromarray(ramp), "ramp")


class Counting(Filter):
    """Counts what it decodes."""

    def __init__(self):
        super().__init__()
        self.decoded = 0

    def decode(self, sample, shrink_to=None):
        self.decoded += 1
        return super().decode(sample, shrink_to)


def resumed(make, stop, workers=0, **changes):
    """(batches of a run, those of a run that stops after `stop` of them and goes on, decodes of what went on)."""
    whole = make(workers=workers)
    all_of_them = list(itertools.islice(iter(whole), stop + 6))
    first = make(workers=workers)
    list(itertools.islice(iter(first), stop))
    filter = Counting()
    second = make(workers=workers, filter=filter, **changes)
    state = first.dataset.state_dict(0, True)  # as Composer does it
    assert first.state_dict() == state
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state
    return all_of_them, list(itertools.islice(iter(second), 6)), filter.decoded


def same(batches, others):
    keys = {"image", "tokens"}
    pairs = list(zip(batches, others, strict=True))
    return all(set(a) == set(b) == keys and all((a[k] == b[k]).all() for k in keys) for a, b in pairs)


@pytest.mark.parametrize("stop", [1, 5, 6, 14])  # in the first pass, at its end, in the third
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_goes_on_without_decoding_what_was_seen(stop, workers):
    def make(**arguments):
        source = Numbered(2, 13, reject=(3, 20))
        return load(source, batch=4, crop="random", flip=0.5, resolution=6, tokens=10, **arguments)

    whole, rest, decoded = resumed(make, stop, workers)
    assert same(whole[stop:], rest) and not same(rest, whole[:6])
    if not workers:  # a worker counts in a process of its own
        assert decoded == 6 * 4


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_does_not_count_batches_that_were_fetched_ahead(workers):
    loader = load(Numbered(2, 13), batch=4, workers=workers)
    batches = iter(loader)
    states = [loader.state_dict()]
    for _ in range(9):
        next(batches)
        states.append(loader.state_dict())
    assert [loader.state_dict(ahead=ahead) for ahead in range(10)] == states[::-1]
    with pytest.raises(ValueError, match="position 10 batches ago was asked for, and it remembers 10"):
        loader.state_dict(ahead=10)


@pytest.mark.parametrize(("stop", "decoded"), [(2, 24), (14, 24)])
def test_pictures_that_are_kept_are_decoded_once_after_a_resume(stop, decoded):
    def make(**arguments):
        source = Numbered(3, 8)
        return load(source, batch=4, flip=0.5, keep_decoded=True, tokens=10, word_dropout=0.5, **arguments)

    whole, rest, found = resumed(make, stop)
    assert same(whole[stop:], rest) and found == decoded


def test_with_other_workers_a_resumed_run_begins_a_pass():
    first = load(Numbered(4, 6), workers=2)
    seen = take(first, 9)
    second = load(Numbered(4, 6))
    second.dataset.load_state_dict(first.dataset.state_dict(0, True))
    assert second.dataset.places == [(2, 0)]
    found = take(second, 6)
    assert sorted(found) == list(range(24)) and found != seen[:24]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_goes_on_from_its_own_position(workers):
    """The state has the positions of all ranks, which differ where pictures of one were rejected."""

    def make(rank):
        return load(Numbered(1, 24, reject=(2, 6, 10)), batch=2, rank=rank, world=2, workers=workers)

    whole, places = [], []
    for rank in range(2):
        loader = make(rank)
        whole.append(take(loader, 9))
        places += loader.state_dict(ahead=6)["places"][:1]  # its own; an earlier test may have left a process group
    assert len(places) == 2 and places[0] != places[1]
    for rank in range(2):
        resumed = make(rank)
        resumed.load_state_dict({"batches": 3, "places": places})
        assert take(resumed, 6) == whole[rank][6:]


@pytest.mark.parametrize(("world", "workers"), [(1, 1), (3, 1), (2, 2)])
def test_other_ranks_begin_the_pass_after_that_of_the_foremost(world, workers):
    loader = load(Numbered(4, 6), world=world, workers=workers)
    loader.load_state_dict({"batches": 9, "places": [[(1, 3)], [(2, 1)]]})
    assert loader.dataset.places == [(3, 0)] * workers and loader.dataset.batches == 0


def test_validation_is_limited_and_not_shuffled():
    loader = load(Numbered(3, 8), training=False, flip=1.0, limit=10)
    batches = list(loader)
    assert [numbers(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all((batch["image"][:, 2, 0, 0] == 255).all() for batch in batches)
    assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in batches]
    assert len(loader) == 3 and isinstance(loader.dataset, IterableDataset)  # of a list Composer demands a sampler
    parts = [[n for b in load(Numbered(3, 7), training=False, rank=r, world=2) for n in numbers(b)] for r in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(21)) and parts[0] == sorted(parts[0])


def test_rejected_pictures_are_left_out_and_counted(capsys):
    found = take(load(Numbered(2, 5, reject=(3, 7)), filter=Filter()), 6)
    assert set(found) == set(range(10)) - {3, 7}
    assert "pictures: left out 2 of 10 samples: broken_image 2" in capsys.readouterr().out
    assert "left out" not in capsys.readouterr().out


def test_a_part_without_a_picture_is_an_error():
    with pytest.raises(ValueError, match="part 1 of 1 of the source has no usable image: check it"):
        next(iter(load(Numbered(1, 3, reject=(0, 1, 2)))))
    with pytest.raises(ValueError, match="the validation set has no usable image; check its source and its filter"):
        load(Numbered(1, 3, reject=(0, 1, 2)), training=False)
    with pytest.raises(ValueError, match="part 4 of 4 of the source has no usable image: use fewer workers or ranks"):
        next(iter(load(Numbered(1, 3), rank=3, world=4, batch=1)))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("cannot fetch a.tar: HTTP 403"), "cannot fetch a.tar: HTTP 403"),
        (FileNotFoundError("no file a.tar: a shard of the source is gone"), "no file a.tar: a shard .* is gone"),
        (OSError(errno.EIO, "Input/output error", "a.tar"), "a.tar: Input/output error; look at the disk .*"),
        (None, "part 1 of 1 of the source has no usable image: .*"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_of_one_line(workers, error, line):
    """Of a worker process, PyTorch gives the traceback as the error's text."""

    class Broken(Numbered):
        def read(self, shard):
            yield Rejected("a", "broken_image", "")
            if error is not None:
                raise error

    with pytest.raises(ValueError) as found:
        next(iter(load(Broken(1, 1), workers=workers)))
    assert type(found.value) is ValueError and re.fullmatch(line, str(found.value))


def test_the_place_of_an_operation_that_fails_is_said():
    """Such as of a source of one's own that takes the text of a file for a number."""

    class Counting(Numbered):
        def read(self, shard):
            yield int("many")

    with pytest.raises(ValueError, match=r"^invalid literal .*: 'many' \(.*test_pictures.py, line \d+\)$"):
        next(iter(load(Counting(1, 1))))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_filter_returns_is_checked(workers):
    """What is no sample was left out, without a word."""

    class Forgetful(Filter):
        def decode(self, sample, shrink_to=None):
            found = super().decode(sample, shrink_to)
            return found if sample.key.endswith("0") else None

    with pytest.raises(ValueError, match=r"^Forgetful.decode\(\) of the sample '.*' returns None; return a Decoded"):
        list(itertools.islice(load(Numbered(1, 4), workers=workers, filter=Forgetful()), 4))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_a_filter_raises_is_one_line(workers):
    """Of a worker process it was a traceback."""

    class Strict(Filter):
        def decode(self, sample, shrink_to=None):
            raise ValueError("strict: a score of 11")

    with pytest.raises(ValueError, match=r"^strict: a score of 11 \(Strict.decode\(\) of the sample '0'\)$"):
        next(iter(load(Numbered(1, 4), workers=workers, filter=Strict())))


@pytest.mark.parametrize("error", [Outage, ConnectionError])
@pytest.mark.parametrize(("training", "workers"), [(True, 0), (True, 1), (False, 0)])
def test_a_server_that_does_not_answer_is_an_outage(training, workers, error):
    """By which a cluster starts the job again."""

    class Silent(Numbered):
        def read(self, shard):
            yield from super().read(shard)
            raise error("cannot fetch a.tar: no answer")

    with pytest.raises(Outage, match="^cannot fetch a.tar: no answer$"):
        next(iter(load(Silent(1, 1), training=training, workers=workers)))
