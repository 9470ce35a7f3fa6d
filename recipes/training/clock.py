"""The position of a run and its length: durations such as "500ba", "2ep", "1000sp" and "0.5dur"."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["ba", "ep", "sp"]  # batches (optimizer steps), epochs, samples
Length = tuple[float, Unit]

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ba|ep|sp|dur)")


def parse_duration(text: str) -> tuple[float, str]:
    """Parse a duration: "500ba" -> (500.0, "ba"). The unit "dur" is a share of the whole run.

    Raises:
        ValueError: not a number followed by ba, ep, sp or dur.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write a number and a unit, such as 500ba, 2ep, 1000sp or 0.5dur")
    return float(match[1]), match[2]


@dataclass(frozen=True)
class Clock:
    """The position of a run at one moment. It is immutable: engines make a new one for each moment.

    Attributes:
        batch: optimizer steps done.
        sample: samples trained on, over all ranks.
        epoch: complete passes over the data.
        duration: length of the run as in the recipe: "2000ba", "3ep" or "100000sp".
        epoch_batches: optimizer steps per epoch; None if it is not known.
        epoch_began: batch at which the present epoch began; None: after epochs as long as the present one. They differ
            where a run goes on with batches of another size, or with other data.
        before: (batch, sample, epoch) of the previous moment: the end of the previous step or epoch.
    """

    batch: int
    sample: int
    epoch: int
    duration: str
    epoch_batches: int | None = None
    epoch_began: int | None = None
    before: tuple[int, int, int] = (0, 0, 0)

    def passed(self, unit: Unit) -> int:
        """How much of the run is done, in the given unit."""
        return {"ba": self.batch, "sp": self.sample, "ep": self.epoch}[unit]

    @property
    def length(self) -> Length:
        """The length of the run in its own unit."""
        return parse_duration(self.duration)

    @property
    def share(self) -> float:
        """The share of the run that is done, from 0 to 1: of its batches, where it is known how many an epoch has."""
        value, unit = self.position(self.duration)
        return min(1.0, self.passed(unit) / value)

    @property
    def ended(self) -> bool:
        """Whether the run has reached its length."""
        value, unit = self.length
        return self.passed(unit) >= value

    @property
    def ends_with_epoch(self) -> bool:
        """Whether all batches of the run are done, and only their epoch is not counted yet."""
        value, unit = self.length
        if unit != "ep" or self.epoch_batches is None or self.epoch_began is None:
            return False
        return self.epoch + 1 == value and self.batch - self.epoch_began >= self.epoch_batches

    def before_last_batch(self, samples: int) -> Clock:
        """The clock of the moment before the last batch, which had this many samples over all ranks."""
        epoch, began = self.epoch, self.epoch_began
        if epoch and began == self.batch:  # the batch was the last one of its epoch
            epoch -= 1
            began = None if self.epoch_batches is None else self.batch - self.epoch_batches
        sample = max(0, self.sample - samples)
        return replace(self, batch=self.batch - 1, sample=sample, epoch=epoch, epoch_began=began)

    def measure(self, duration: str) -> Length:
        """Convert a duration to batches if possible, otherwise keep its unit; a share of the run becomes a length.

        Raises:
            ValueError: not a duration.
        """
        value, unit = self._resolved(duration)
        if unit == "ep" and self.epoch_batches is not None:
            value, unit = value * self.epoch_batches, "ba"
        return value, unit

    def position(self, duration: str) -> Length:
        """When this much of the run is done, in the unit of `measure`.

        It differs from `measure` if earlier epochs had another number of batches. Batches of the present epoch and of
        later ones are then added to those that were done before it.

        Raises:
            ValueError: not a duration.
        """
        epochs, unit = self._resolved(duration)
        if unit != "ep" or self.epoch_batches is None or self.epoch_began is None:
            return self.measure(duration)
        if epochs < self.epoch:
            return self.epoch_began * epochs / self.epoch, "ba"
        return self.epoch_began + (epochs - self.epoch) * self.epoch_batches, "ba"

    def crossed(self, every: str) -> bool:
        """Whether a multiple of an interval lies between `before` and now.

        Raises:
            ValueError: not a duration.
        """
        value, unit = self._resolved(every)
        if unit == "ep" and abs(value - round(value)) > 1e-9:  # shares of a run that end within epochs
            value, unit = self.measure(every)
        before = {"ba": self.before[0], "sp": self.before[1], "ep": self.before[2]}[unit]
        # Shares of a run are rounded: 0.07 times 100 batches is slightly more than 7.
        return int(self.passed(unit) / value + 1e-9) > int(before / value + 1e-9)

    def _resolved(self, duration: str) -> Length:
        """A duration in its own unit, or in that of the run if it is a share of the run."""
        value, unit = parse_duration(duration)
        if unit == "dur":
            total, unit = self.length
            value *= total
        return value, unit


class Interval:
    """Determines when a periodic action is due: at intervals, and at the end of a run.

    Example::

        due = Interval("500ba")
        if due(run.clock):  # asked at the end of each step and of each epoch
            ...
    """

    def __init__(self, every: str | None, key: str = "every") -> None:
        """
        Args:
            every: a duration; None: only at the end of the run.
            key: of the configuration, by which an error names it.

        Raises:
            ValueError: not a duration, or not above 0.
        """
        if every is not None and parse_duration(every)[0] <= 0:
            raise ValueError(f"{key}: `{every}`; give an interval above 0")
        self.every = every
        self.held_at = -1  # batch

    def __call__(self, clock: Clock) -> bool:
        """Whether it is due now; True at most once per batch."""
        if clock.batch == self.held_at:
            return False
        if clock.ended or (self.every is not None and clock.crossed(self.every)):
            self.held_at = clock.batch
            return True
        return False


class CheckpointInterval(Interval):
    """An interval that waits for the end of the epoch with which the run ends.

    A checkpoint of the batch before it would be one of a run that has not ended: the next start would validate again.
    """

    def __init__(self, every: str | None) -> None:
        """Arguments and errors as of `Interval`."""
        super().__init__(every)
        self._waits = False

    def __call__(self, clock: Clock) -> bool:
        """See `Interval`."""
        due = super().__call__(clock) or self._waits
        self._waits = due and clock.ends_with_epoch
        return due and not self._waits
