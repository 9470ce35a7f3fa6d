"""How long steps of training and their parts take."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

TimePoint = float | torch.cuda.Event  # seconds; or on a GPU an event, whose time is known only after it
Marks = dict[str, list[tuple[TimePoint, TimePoint]]]  # name of a part -> beginnings and ends


class StepTimer:
    """Measures steps and parts of steps, and averages over the latest ones.

    On a GPU, parts are measured by CUDA events that are read after they have passed: the host never waits for the
    device. Parts may overlap, occur several times in a step, or not at all.

    Example::

        timer = StepTimer(window=50, on_gpu=False)
        for batch in batches:
            timer.begin_step()
            with timer.part("forward"):
                ...
            timer.end_step(samples=len(batch))
    """

    def __init__(self, window: int, on_gpu: bool) -> None:
        """
        Args:
            window: number of steps over which averages are taken.
            on_gpu: whether the parts run on the current CUDA device.
        """
        self.on_gpu = on_gpu
        self._steps: deque[tuple[int, float]] = deque(maxlen=window)  # (samples, seconds)
        self._parts: deque[dict[str, float]] = deque(maxlen=window)  # seconds of each part
        self._waiting: deque[Marks] = deque()  # parts of steps whose events may not have passed
        self._marks: Marks = defaultdict(list)
        self._open: dict[str, TimePoint] = {}
        self._began = 0.0

    def begin_step(self) -> None:
        """Must be called when a step begins. Parts that have not ended are forgotten."""
        self._open.clear()
        self._began = perf_counter()

    def begin(self, part: str) -> None:
        """Must be called when a part of a step begins."""
        self._open[part] = self._now()

    def end(self, part: str) -> None:
        """Must be called when a part of a step ends; a part that has not begun is ignored."""
        if part in self._open:
            self._marks[part].append((self._open.pop(part), self._now()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context that is measured as a part of a step."""
        start = self._now()
        yield
        self._marks[name].append((start, self._now()))

    def end_step(self, samples: int, counts: bool = True) -> None:
        """Must be called when a step ends.

        Args:
            samples: number of samples in the step, over all ranks.
            counts: False: leave this step out of all averages.
        """
        if counts:
            self._steps.append((samples, perf_counter() - self._began))
            self._waiting.append(dict(self._marks))
        self._marks.clear()
        while self._waiting and _passed(self._waiting[0]):
            marks = self._waiting.popleft()
            self._parts.append({name: sum(_seconds(*pair) for pair in pairs) for name, pairs in marks.items()})

    @property
    def full(self) -> bool:
        """Whether as many steps were measured as averages are taken over."""
        return len(self._steps) == self._steps.maxlen

    def samples_per_second(self) -> float:
        """Samples per second, averaged over the latest steps."""
        return sum(samples for samples, _ in self._steps) / self._total_seconds()

    def steps_per_second(self) -> float:
        """Steps per second, averaged over the latest steps."""
        return len(self._steps) / self._total_seconds()

    def share(self, part: str) -> float | None:
        """The mean time of a part, as a share of the mean time of a step; None if no parts are known yet."""
        if not self._parts:
            return None
        mean = sum(parts.get(part, 0.0) for parts in self._parts) / len(self._parts)
        return mean * self.steps_per_second()

    def _total_seconds(self) -> float:
        return sum(seconds for _, seconds in self._steps)

    def _now(self) -> TimePoint:
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _passed(marks: Marks) -> bool:
    return all(isinstance(end, float) or end.query() for pairs in marks.values() for _, end in pairs)


def _seconds(start: TimePoint, end: TimePoint) -> float:
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
