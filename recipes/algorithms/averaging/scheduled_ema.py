"""An exponential moving average of the weights that begins late in a run, and costs nothing until then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from data.aliases import Duration
from data.cost import FLOAT, Cost, Plan, count_text, size_text
from data.system.log import log
from recipes.algorithms.averaging.average import Average, HostAverage, bytes_of_average
from recipes.algorithms.microbatch.device_memory import free_memory
from recipes.training.clock import Clock, Length
from recipes.training.lever import Lever
from recipes.training.run import Run

CHECKED = 3  # steps of a start after which moments and activations have their memory
MUCH = 0.3  # share of the weights of its beginning in the average at the end of a run, above which a run warns


class ScheduledEMA(Lever):
    """Averages the weights over the last part of a run.

    Source: MosaicML, "Training Stable Diffusion: deep dive" (the last 3.5% of the run). The average starts
    as a copy of the weights. From then on, validation, sample grids and exports use it, and checkpoints hold it.

    Attributes:
        begun: batch at which the average began; None before.
        average: the average; None before it begins.
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
            decay: share of the average that an update keeps, between 0 and 1. Instead of more than 0.9999, set a larger
                `every` and a lower decay: the average of a weight that hardly changes is wrong by up to 6e-8 / (1 -
                decay) of its size, because of 32-bit rounding.
            half_life: duration after which the weight of a contribution has halved, such as 5000ba; `decay` follows
                from it and from `every`.
            start: when the average begins, such as 800000ba or 0.965dur; null: at the start of the run.
            last: how long before the end of the run the average begins, such as 50000ba.
            every: batches from one update to the next.
            device: same: on the device of the parameters. cpu: in host memory, updated by the CPU from a copy that
                training does not wait for (DALL-E: every 25 batches with a decay of 0.99).

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
        self.begins: Length | None = None  # known at the start of training
        self.begun: int | None = None
        self.average: Average | None = None
        self.task: nn.Module | None = None
        self.users = 0  # nested uses of the averaged weights in the model
        self.steps = 0  # of this start
        self._watchers: list[Callable[[], AbstractContextManager]] = []

    @property
    def running(self) -> bool:
        """Whether the average has begun."""
        return self.average is not None

    def watch(self, context: Callable[[], AbstractContextManager]) -> None:
        """Run each update inside of `context()`, for instance to measure its time."""
        self._watchers.append(context)

    # --- hooks ---------------------------------------------------------------------------------

    def change_modules(self, run: Run) -> None:
        self.task = run.task
        for name, module in run.task.named_modules():
            if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
                log.warning(
                    f"scheduled_ema: {name} ({type(module).__name__}) has statistics of the weights of training, which "
                    "validation, samples and exports of averaged weights use, too; take a norm without statistics, "
                    "such as GroupNorm"
                )
                break

    def check_run(self, run: Run) -> None:
        """Finds out when the average begins, and the decay."""
        if self.half_life is not None:
            value, unit = run.clock.measure(self.half_life)
            if unit != "ba" or value <= 0:
                raise ValueError(f"scheduled_ema: half_life must be a number of batches above 0, got {self.half_life}")
            self.decay = 0.5 ** (self.every / value)
        self.begins = self._beginning(run.clock)
        left = self._left_of_beginning(run.clock)
        if left > MUCH:
            log.warning(
                f"scheduled_ema: at the end of the run, {left:.0%} of the average will be the weights with which it "
                "began; lower the decay, or begin earlier"
            )

    def begin(self, run: Run) -> None:
        self.check_run(run)
        if self.average is None and self._due(run.clock):
            if run.clock.passed(self.begins[1]) > self.begins[0]:
                log.info("scheduled_ema: the checkpoint is of a batch after start, but has no average; it begins here")
            self._begin(run.clock)

    def batch_start(self, run: Run) -> None:
        while self.users:  # an exception ended a validation
            self.leave()

    def before_step(self, run: Run) -> None:
        if self.average is not None:
            self.average.before_step()

    def step_end(self, run: Run) -> None:
        """After the optimizer's step, before validation, checkpoints and callbacks."""
        self.steps += 1
        if self.average is None:
            if self._due(run.clock):
                with self._watched():
                    self._begin(run.clock)
            elif self.steps == CHECKED and run.on_gpu:
                self._check_room()
        elif (run.clock.batch - self.begun) % self.every == 0:
            with self._watched():
                self.average.update(self.decay)

    def eval_start(self, run: Run) -> None:
        if self.running:
            self.enter()

    def eval_end(self, run: Run) -> None:
        if self.running:
            self.leave()

    def end(self, run: Run) -> None:
        if self.running:
            self.average.settle()  # else the error of a last update would be seen by nobody, if nothing is saved
        else:
            value, unit = self.begins
            log.warning(
                f"scheduled_ema: the run ended before the average began, at {value:g}{unit}: its exports have the "
                "weights of training; give a start within the run"
            )

    def _watched(self) -> ExitStack:
        stack = ExitStack()
        for context in self._watchers:
            stack.enter_context(context())
        return stack

    def _check_room(self) -> None:
        """Warn if training leaves too little memory for the average, which may begin after days."""
        needed, free = self.bytes_to_come(), free_memory()
        if needed > free:
            log.warning(
                f"scheduled_ema: the average begins at {self.begins[0]:g}{self.begins[1]} and takes "
                f"{size_text(needed)} of each GPU, of which training leaves {size_text(free)}: the run would then end, "
                "out of memory; lower training.microbatch, which a resumed run may change, or set device: cpu"
            )

    def _due(self, clock: Clock) -> bool:
        value, unit = self.begins
        return clock.passed(unit) >= value

    def _beginning(self, clock: Clock) -> Length:
        """When the average begins.

        Raises:
            ValueError: it would not begin within the run, or too late for an update.
        """
        total, unit = clock.position(clock.duration)
        if self.last is None:
            start = self.start or "0ba"
            value, given = clock.position(start)
            key = f"start: {start}"
        else:
            value, given = clock.measure(self.last)
            key = f"last: {self.last}"
            if given != unit:
                raise ValueError(f"scheduled_ema: {key} cannot be taken from a run of {total:g}{unit}")
            if value > total:
                raise ValueError(f"scheduled_ema: {key} is longer than the run of {total:g}{unit}")
            value = total - value
        value = math.ceil(value - 1e-6)  # 0.965 of a number of batches is slightly above or below an integer
        if given == unit and value >= total:
            raise ValueError(f"scheduled_ema: {key} leaves nothing to average in a run of {total:g}{unit}")
        if given == unit == "ba" and value + self.every > total:
            raise ValueError(
                f"scheduled_ema: {key} leaves {count_text(int(total) - value, 'batch', 'batches')} of the run, and "
                f"every: {self.every} none of its updates; lower every"
            )
        return value, given

    def _left_of_beginning(self, clock: Clock) -> float:
        """Share that the weights of its beginning have in the average at the end of the run; 0 if not known here."""
        (total, unit), (value, given) = clock.position(clock.duration), self.begins
        if self.begun is not None:  # by the checkpoint: the run may have been shorter then
            value, given = self.begun, "ba"
        return self.decay ** ((total - value) // self.every) if unit == given == "ba" else 0.0

    def _begin(self, clock: Clock) -> None:
        self.average = self._new_average()
        self.begun = clock.batch
        log.info(
            f"scheduled_ema: begins at batch {self.begun}, {len(self.average.names)} tensors, "
            f"{self.average.bytes / 1e6:,.1f} MB per rank"
        )

    def _new_average(self) -> Average:
        return (HostAverage if self.device == "cpu" else Average)(self.task)

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
                host_bytes=2 * whole * plan.share, note=f"for the average and a copy, {begins}", averaged_bytes=whole
            )
        return Cost(device_bytes=whole * plan.share, note=f"for the average, {begins}", averaged_bytes=whole)

    def bytes_to_come(self) -> int:
        """Memory on this rank's device that the average will take when it begins; 0 once it has."""
        return bytes_of_average(self.task) if self.average is None and self.device == "same" else 0

    # --- into the model and back ---------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[bool]:
        """A context in which the model has its averaged weights if the average has begun; yields whether it has.

        Weights are exchanged in place, and restored when the context ends, also by an exception. Each rank exchanges
        its own shards, without communication.
        """
        if not self.running:
            yield False
            return
        self.enter()
        try:
            yield True
        finally:
            self.leave()

    def enter(self) -> None:
        """Put the averaged weights into the model, unless they are there already."""
        if self.users == 0:
            self.average.put_in()
        self.users += 1

    def leave(self) -> None:
        """Restore the weights of training when the last use of the averaged weights ends."""
        self.users -= 1
        if self.users == 0:
            self.average.take_out()

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors by the names of parameters, sharded as these are; empty before the average begins."""
        if self.average is None:
            return {}
        if self.users:
            raise RuntimeError("scheduled_ema: a checkpoint while the averaged weights are in the model")
        return {"begun": self.begun, "average": self.average.tensors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "begun" not in state:
            return
        self.average = self._new_average()
        saved = state["average"]
        if not set(saved) & set(self.average.names):
            # Earlier versions saved the names of parameters in the wrapper around the task.
            saved = {name.removeprefix("task."): tensor for name, tensor in saved.items()}
        self.average.load(saved)
        self.begun = state["begun"]
