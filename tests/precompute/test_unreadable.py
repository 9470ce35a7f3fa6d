"""Input shards that cannot be read."""

from types import SimpleNamespace

import pytest

from precompute.output import DONE, OutputSet
from precompute.unreadable import Unreadable, could_not_be_read, not_done, read_samples


def source_with(error):
    def read(shard):
        yield "a sample"
        raise error

    return SimpleNamespace(read=read)


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (ConnectionError("the server\nis gone"), Unreadable, "^the server is gone$"),
        (KeyError("a library's own"), Unreadable, "own"),
        (TypeError("a bug of ours"), TypeError, "a bug of ours"),  # every shard would be given up
        (MemoryError(), MemoryError, "^while input shard 00 was read$"),
    ],
)
def test_errors_of_the_shard_and_of_the_program_are_told_apart(error, raised, said):
    samples = read_samples(source_with(error), "00")
    assert next(samples) == "a sample"
    with pytest.raises(raised, match=said):
        next(samples)


def test_what_the_consumer_raises_is_no_error_of_the_shard():
    samples = read_samples(SimpleNamespace(read=lambda shard: iter("ab")), "00")
    with pytest.raises(ValueError, match="a full disk"):
        for _ in samples:
            raise ValueError("a full disk")


def test_folders_are_looked_into_when_no_other_rank_has_one_left(tmp_path, monkeypatch):
    """Of tens of thousands, on a file system that all ranks share."""
    looked, is_done = [], OutputSet.is_done
    monkeypatch.setattr(OutputSet, "is_done", lambda output, shard: looked.append(shard) or is_done(output, shard))
    output = OutputSet(tmp_path, ["a", "b", "c"])
    for shard in "ab":
        output.folder(shard).mkdir(parents=True)
    (output.folder("a") / DONE).write_text("{}")
    assert not_done(output) == (1, {}) and not looked
    output.note_unreadable("c", "the server is gone")
    assert not_done(output) == (2, {"c": "the server is gone"}) and set(looked) == {"a", "b"}  # b lost its files
    (output.folder("b") / DONE).write_text("{}")
    assert not_done(output) == (1, {"c": "the server is gone"})


def test_the_first_three_are_listed():
    problems = dict(zip("abcde", "vwxyz", strict=True))
    text = str(could_not_be_read(problems, ", or leave them out"))
    assert text == (
        "5 input shards could not be read; start the job again to try them again, or leave them out: a: v; b: w; c: x; "
        "and 2 more, in the folder unreadable"
    )
    assert str(could_not_be_read({"a": "v"}, "")).endswith("try them again: a: v")
