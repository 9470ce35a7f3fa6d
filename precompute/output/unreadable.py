"""Input shards that cannot be read. A job notes them and goes on with the others; the last rank to end names them."""

from __future__ import annotations

from collections.abc import Iterator

from data.sources.base import Rejected, Sample, Source, samples_of
from data.system.disk_errors import may_pass
from data.system.errors import Outage, WrongResult, with_place
from precompute.output.claims import begun_shards
from precompute.output.output_set import UNREADABLE, OutputSet
from precompute.output.problems import Problem

BUGS = (AssertionError, AttributeError, NameError, TypeError, WrongResult)  # errors that end the job


class Unreadable(Exception):
    """The reading of an input shard has broken off.

    Args:
        problem: why.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


def read_samples(source: Source, shard: str) -> Iterator[Sample | Rejected]:
    """The samples of an input shard, see `Source.read`.

    Raises:
        Unreadable: an error in the middle of it. One bad shard of many must not end the job.
        MemoryError: the shard may be whole, as those that would be given up after it.
    """
    try:
        yield from samples_of(source, shard)
    except BUGS as error:
        if not isinstance(error, WrongResult):  # which says where it is
            error.add_note(f"{type(source).__name__}.read() of the input shard {shard}")
        raise
    except MemoryError as error:
        raise MemoryError(f"while input shard {shard} was read") from error
    except Exception as error:  # libraries that read files have errors of their own
        # With its place, as it may be a bug of a source of one's own, and nothing shows the traceback.
        raise Unreadable(Problem(with_place(error), may_pass(error))) from error


def not_done(output: OutputSet) -> tuple[int, dict[str, Problem]]:
    """The number of a set's shards that are not done, and of these the ones that could not be read, each with the
    problem. What is neither is left to other ranks: a shard that a rank has begun may be read after all, though another
    rank could not read it."""
    # In this order: of two ranks that end at the same time, one then sees what both have left.
    begun = begun_shards(output)
    missing = output.absent()
    problems = {shard: problem for shard, problem in output.unreadable().items() if shard not in begun}
    if not set(missing) - problems.keys():  # most ranks end before, without a look into each folder
        missing = output.remaining()
    return len(missing), {shard: problems[shard] for shard in missing if shard in problems}


def could_not_be_read(problems: dict[str, Problem], advice: str) -> ValueError:
    """The error that names input shards, which the last rank raises: the launcher stops the others when one fails.

    It is an `Outage` where one of them may be read later, so that a cluster starts the job again.

    Args:
        problems: why each of them could not be read.
        advice: how to go on without them.
    """
    kind = Outage if any(problem.outage for problem in problems.values()) else ValueError
    return kind(
        f"{len(problems)} input shards could not be read; start the job again to try them again{advice}: "
        f"{listed(problems)}"
    )


def listed(problems: dict[str, Problem]) -> str:
    """The first of several input shards, each with its problem."""
    more = f"; and {len(problems) - 3} more, in the folder {UNREADABLE}" if len(problems) > 3 else ""
    return "; ".join(f"{shard}: {problem}" for shard, problem in list(problems.items())[:3]) + more
