"""An exponential moving average of the weights that begins late in a run, and costs nothing before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.loggers import Logger
from composer.utils import dist
from torch import nn

from data.aliases import Duration  # noqa: F401 - read from the annotations below
from data.cost import FLOAT, Cost, Plan
from recipes.algorithms.averaging.average import Average, HostAverage, bytes_of_average

Length = tuple[float, TimeUnit]


class ScheduledEMA(Algorithm):
    """Averages the weights over the last part of a run ("Training Stable Diffusion: deep dive": 3.5% of it).

    The average starts as a copy of the weights. Validation, sample grids, exports and checkpoints have it from then on.

    Attributes:
        timer: makes a context in which each update is done; whoever measures the time sets it.
    """

    def __init__(
        self,
        *,
        decay: float | None = None,
        half_life: Duration | None = None,
        start: Duration | None = None,
        last: Duration | None = None,
        every: int = 1,
        device: Literal["same", "cpu"] = "same",
    ) -> None:
        """Give `decay` or `half_life`; `start` or `last` or, for the whole run, neither.

        Args:
            decay: share of the average that an update keeps, between 0 and 1.
            half_life: batches after which weights count half in it; the decay follows from it and from `every`.
            start: when it begins, such as 800000ba or 0.965dur; null: at the start of the run.
            last: how long before the end of the run it begins, such as 50000ba.
            every: batches between two updates.
            device: where the average is kept; cpu: in host memory, updated there from a copy that training does not
                wait for (DALL-E: every 25 batches with decay 0.99).

        Raises:
            ValueError: keys that contradict each other, or out of range.
        """
        if (decay is None) == (half_life is None):
            raise ValueError("scheduled_ema: give either decay or half_life")
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"scheduled_ema: decay must lie between 0 and 1, got {decay}")
        if start is not None and last is not None:
            raise ValueError(f"scheduled_ema: start ({start}) and last ({last}) contradict each other; give one")
        if every < 1:
            raise ValueError(f"scheduled_ema: every must be at least 1 batch, got {every}")
        self.decay = decay
        self.half_life = half_life
        self.start = start
        self.last = last
        self.every = every
        self.device = device
        self.begins: Length | None = None  # known at the start of fitting
        self.begun: int | None = None  # batch at which the average was a copy of the weights
        self.average: Average | None = None
        self.state: State | None = None
        self.users = 0  # how many want the averaged weights in the model now
        self.timer: Callable[[], AbstractContextManager] = nullcontext

    # --- events --------------------------------------------------------------------------------

    def match(self, event: Event, state: State) -> bool:
        if event == Event.BATCH_END:  # after the optimizer's step, before validation, checkpoints and callbacks
            if self.average is None:
                return self._due(state)
            return (state.timestamp.batch.value - self.begun) % self.every == 0
        if event in (Event.EVAL_START, Event.EVAL_END):
            return self.average is not None
        if event == Event.BATCH_START:
            return self.users > 0  # a validation was broken off
        if event == Event.AFTER_TRAIN_BATCH:
            return isinstance(self.average, HostAverage)
        return event in (Event.INIT, Event.FIT_START, Event.FIT_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            if sum(isinstance(algorithm, ScheduledEMA) for algorithm in state.algorithms) > 1:
                raise ValueError("scheduled_ema: a run has one average; remove the other from algorithms")
            self.state = state
        elif event == Event.FIT_START:
            self._plan(state)
        elif event == Event.BATCH_END:
            with self.timer():
                if self.average is None:
                    self._begin(state)
                else:
                    self.average.update(self.decay)
        elif event == Event.AFTER_TRAIN_BATCH:
            self.average.before_step()
        elif event == Event.EVAL_START:
            self.enter()
        elif event == Event.EVAL_END:
            self.leave()
        elif event == Event.BATCH_START:
            while self.users:
                self.leave()
        elif event == Event.FIT_END and self.average is None:
            _say("scheduled_ema: the run ended before the average began; lower start")

    def _due(self, state: State) -> bool:
        value, unit = self.begins
        return state.timestamp.get(unit).value >= value

    def _plan(self, state: State) -> None:
        if self.half_life is not None:
            value, unit = measure(self.half_life, state)
            if unit != TimeUnit.BATCH or value <= 0:
                raise ValueError(f"scheduled_ema: half_life must be a number of batches above 0, got {self.half_life}")
            self.decay = 0.5 ** (self.every / value)
        self.begins = self._beginning(state)
        if self.average is None and self._due(state):
            if state.timestamp.get(self.begins[1]).value > self.begins[0]:
                _say("scheduled_ema: the run resumes after its start without an average, so it begins here")
            self._begin(state)

    def _beginning(self, state: State) -> Length:
        """When the average begins.

        Raises:
            ValueError: not within the run, or too late for an update.
        """
        total, unit = measure(str(state.max_duration.to_timestring()), state)
        if self.last is None:
            value, given = measure(self.start or "0ba", state)
            key = f"start: {self.start}"
        else:
            value, given = measure(self.last, state)
            key = f"last: {self.last}"
            if given != unit:
                raise ValueError(f"scheduled_ema: {key} cannot be taken from a run of {total:g}{unit.value}")
            if value > total:
                raise ValueError(f"scheduled_ema: {key} is longer than the run of {total:g}{unit.value}")
            value = total - value
        value = math.ceil(value - 1e-6)  # a share such as 0.965 is a hair off
        if given == unit and value >= total:
            raise ValueError(f"scheduled_ema: {key} leaves nothing to average in a run of {total:g}{unit.value}")
        if given == unit == TimeUnit.BATCH and value + self.every > total:
            raise ValueError(
                f"scheduled_ema: {key} leaves {total - value:g} batches, and every: {self.every} none of its updates"
            )
        return value, given

    def _begin(self, state: State) -> None:
        self.average = self._new_average(state)
        self.begun = state.timestamp.batch.value
        _say(
            f"scheduled_ema: begins at batch {self.begun}, {len(self.average.names)} tensors, "
            f"{self.average.bytes / 1e6:,.1f} MB a rank"
        )

    def _new_average(self, state: State) -> Average:
        return (HostAverage if self.device == "cpu" else Average)(state.model)

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """Memory of the average, and its size in checkpoints; see `data.cost`."""
        begins = "from the start on"
        if args["last"]:
            begins = f"in the last {args['last']}"
        elif args["start"]:
            begins = f"from {args['start']} on"
        whole = FLOAT * plan.trained
        if args["device"] == "cpu":
            return Cost(
                host_bytes=2 * whole / plan.shards, note=f"for the average and a copy, {begins}", averaged_bytes=whole
            )
        return Cost(device_bytes=whole / plan.shards, note=f"for the average, {begins}", averaged_bytes=whole)

    def bytes_to_come(self, model: nn.Module) -> int:
        """Memory on this rank's device that the average will take when it begins; 0 once it has."""
        return bytes_of_average(model) if self.average is None and self.device == "same" else 0

    # --- into the model and back ---------------------------------------------------------------

    def enter(self) -> None:
        """The averaged weights go into the model, unless they are there already."""
        if self.users == 0:
            self.average.put_in()
        self.users += 1

    def leave(self) -> None:
        """The weights of training come back when no one wants the averaged ones any more."""
        self.users -= 1
        if self.users == 0:
            self.average.take_out()

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors, by name, so that a checkpoint loads on another number of ranks.

        Composer writes the first rank's state of an algorithm, into sharded checkpoints too: what is sharded is
        gathered for it, into host memory.
        """
        state = super().state_dict()
        if self.average is not None:
            if self.users:
                raise RuntimeError("scheduled_ema: a checkpoint while the averaged weights are in the model")
            state |= {"begun": self.begun, "average": self.average.whole()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "begun" not in state:
            return
        self.average = self._new_average(self.state)
        self.average.load(state["average"])
        self.begun = state["begun"]


def measure(duration: str, state: State) -> Length:
    """A duration as a number of batches where that is known, else in its own unit; shares of the run resolved."""
    time = Time.from_timestring(duration)
    value, unit = time.value, time.unit
    if unit == TimeUnit.DURATION:
        value, unit = value * state.max_duration.value, state.max_duration.unit
    if unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        value, unit = value * int(state.dataloader_len), TimeUnit.BATCH
    return value, unit


def running_average(state: State) -> ScheduledEMA | None:
    """The algorithm of a run whose average has begun."""
    found = (a for a in state.algorithms if isinstance(a, ScheduledEMA) and a.average is not None)
    return next(found, None)


@contextmanager
def averaged(state: State) -> Iterator[bool]:
    """Inside, the model has its averaged weights where there are any; gives whether it does.

    They are written in place and taken out again whatever happens inside. Each rank does it for its own part, without
    the others.
    """
    ema = running_average(state)
    if ema is None:
        yield False
        return
    ema.enter()
    try:
        yield True
    finally:
        ema.leave()


def _say(line: str) -> None:
    if dist.get_global_rank() == 0:
        print(line, flush=True)
