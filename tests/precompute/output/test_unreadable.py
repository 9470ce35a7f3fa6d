"""Input shards that cannot be read."""

import errno
from types import SimpleNamespace

import pytest

from data.sources.base import Rejected
from data.system.errors import Outage, WrongResult
from precompute.output.output_set import DONE, OutputSet
from precompute.output.problems import Problem
from precompute.output.unreadable import Unreadable, could_not_be_read, not_done, read_samples

SAMPLE = Rejected("a", "missing_image")


def source_with(error):
    def read(shard):
        yield SAMPLE
        raise error

    return SimpleNamespace(read=read)


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (ConnectionError("reset"), True),
        (Outage("cannot fetch s3://a/0.tar: 503"), True),
        (OSError(errno.ESTALE, "Stale file handle", "/mnt/0.tar"), True),
        (PermissionError(errno.EACCES, "Permission denied", "/mnt/0.tar"), False),
        (ValueError("cannot fetch s3://a/0.tar: 403"), False),
        (FileNotFoundError("no file s3://a/0.tar"), False),
    ],
)
def test_a_shard_that_may_be_read_later_makes_an_outage(tmp_path, error, outage):
    """By which a job ends with the status that makes a cluster start it again; of all ranks the last one raises it."""
    with pytest.raises(Unreadable) as raised:
        list(read_samples(source_with(error), "00"))
    assert raised.value.problem.outage is outage
    output = OutputSet(tmp_path, ["00", "01"])
    output.note_unreadable("00", raised.value.problem)
    output.note_unreadable("01", Problem("no tar"))
    assert isinstance(could_not_be_read(output.unreadable(), ""), Outage) is outage


def test_a_source_that_raises_stop_iteration_is_named():
    """The generators around it make a RuntimeError of it, whose place is in one of them."""

    class Own:
        def read(self, shard):
            return next(iter([]))

    with pytest.raises(Unreadable, match=r"generator raised StopIteration \(.*test_unreadable.py, line \d+\)$"):
        list(read_samples(Own(), "00"))


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (ConnectionError("the server\nis gone"), Unreadable, "^the server is gone$"),
        (KeyError("a library's own"), Unreadable, r"own.* \(.*test_unreadable.py, line \d+\)$"),  # it may be a bug
        (TypeError("a bug of ours"), TypeError, "a bug of ours"),  # every shard would be given up
        (MemoryError(), MemoryError, "^while input shard 00 was read$"),
    ],
)
def test_errors_of_the_shard_and_of_the_program_are_told_apart(error, raised, said):
    samples = read_samples(source_with(error), "00")
    assert next(samples) == SAMPLE
    with pytest.raises(raised, match=said) as found:
        next(samples)
    bug = isinstance(error, TypeError)
    notes = ["SimpleNamespace.read() of the input shard 00"] if bug else []
    assert getattr(found.value, "__notes__", []) == notes


def test_the_place_of_an_operation_that_fails_is_said():
    """Such as of a source of one's own that takes the text of a file for a number."""
    source = SimpleNamespace(read=lambda shard: iter([int(shard)]))
    with pytest.raises(Unreadable, match=r"^invalid literal .*: 'a' \(.*test_unreadable.py, line \d+\)$"):
        list(read_samples(source, "a"))


def test_what_the_consumer_raises_is_no_error_of_the_shard():
    samples = read_samples(SimpleNamespace(read=lambda shard: iter([SAMPLE, SAMPLE])), "00")
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
    gone = Problem("the server is gone", outage=True)
    output.note_unreadable("c", gone)
    assert not_done(output) == (2, {"c": gone}) and set(looked) == {"a", "b"}  # b lost its files
    (output.folder("b") / DONE).write_text("{}")
    assert not_done(output) == (1, {"c": gone})


def test_the_first_three_are_listed():
    problems = {shard: Problem(text) for shard, text in zip("abcde", "vwxyz", strict=True)}
    text = str(could_not_be_read(problems, ", or leave them out"))
    assert text == (
        "5 input shards could not be read; start the job again to try them again, or leave them out: a: v; b: w; c: x; "
        "and 2 more, in the folder unreadable"
    )
    assert str(could_not_be_read({"a": Problem("v")}, "")).endswith("try them again: a: v")


def test_a_mistake_in_a_source_ends_the_job_at_the_first_shard():
    """All shards were given up otherwise, one after the other."""
    with pytest.raises(WrongResult, match="yields None instead of a Sample or a Rejected, as sample 0"):
        list(read_samples(SimpleNamespace(read=lambda shard: [None]), "00"))
