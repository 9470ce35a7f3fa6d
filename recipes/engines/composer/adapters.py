"""Levers and callbacks of this repository as Composer's algorithms and callbacks."""

from __future__ import annotations

from typing import Any

from composer import Callback as ComposerCallback
from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from recipes.engines.checkpoints.lazy import copied
from recipes.engines.checkpoints.lever_states import joined, kept_state
from recipes.engines.composer.callback_states import packed, unpacked
from recipes.engines.composer.load_planner import LoadPlanner
from recipes.engines.composer.run import ComposerRun
from recipes.training.callback import Callback
from recipes.training.hooks import Hooks, stops_nothing
from recipes.training.lever import Lever
from recipes.training.levers import Levers

# Composer's events -> the methods of `Hooks`. What is not here, levers alone have (see `RunLevers`).
HOOKS = {
    Event.AFTER_LOAD: "loaded",
    Event.FIT_START: "begin",
    Event.BEFORE_DATALOADER: "before_data",
    Event.BATCH_START: "batch_start",
    Event.BEFORE_TRAIN_BATCH: "before_passes",
    Event.BEFORE_FORWARD: "before_forward",
    Event.AFTER_LOSS: "after_forward",
    Event.BEFORE_BACKWARD: "before_backward",
    Event.AFTER_BACKWARD: "after_backward",
    Event.AFTER_TRAIN_BATCH: "gradients_ready",
    Event.BATCH_END: "step_end",
    Event.EPOCH_END: "epoch_end",
    Event.EVAL_START: "eval_start",
    Event.EVAL_BEFORE_FORWARD: "eval_before_forward",
    Event.EVAL_AFTER_FORWARD: "eval_after_forward",
    Event.EVAL_END: "eval_end",
    Event.FIT_END: "end",
}


class RunLevers(Algorithm):
    """All levers of a run as one algorithm, so that their order is that of `Levers` and not Composer's.

    It also keeps the run up to date: algorithms act before callbacks at each event.
    """

    def __init__(self, levers: Levers, run: ComposerRun) -> None:
        self.levers = levers
        self.run = run

    def match(self, event: Event, state: State) -> bool:
        return event in HOOKS or event in (Event.INIT, Event.BEFORE_LOAD)

    @stops_nothing
    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self.run.attach(state, logger)
            self.levers.prepare(self.run)
            check_trained(self.run)
        elif event == Event.BEFORE_LOAD:
            self.run.use_precision()
            self.levers.compile(self.run)
        elif event == Event.AFTER_TRAIN_BATCH:
            self.levers.finish_gradients(self.run)
        else:
            if event == Event.BATCH_START:
                self.run.complete_batch()
            elif event == Event.BEFORE_TRAIN_BATCH:
                self.run.begin_batch()
            elif event == Event.BEFORE_FORWARD:
                self.run.begin_pass()
            self.levers.call(HOOKS[event], self.run)


def check_trained(run: ComposerRun) -> None:
    """Check that the optimizer, which Composer needs before levers change the model, has all trained parameters.

    Raises:
        ValueError: a lever has replaced or added some, which would not be trained and cannot be saved.
    """
    known = {id(parameter) for parameter in run.trained}
    named = run.task.named_parameters()
    missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in known]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"algorithms: a lever has replaced or added the parameter {missing[0]}{more}, which the optimizer does not "
            "have; replace modules inside of `with run.new_parameters():`, by ones with parameters of the same names, "
            "or use training.engine=lightning"
        )


class _LeverState(Algorithm):
    """A lever's place in checkpoints; see `_lever_state`."""

    lever: Lever
    planner: LoadPlanner | None

    def match(self, event: Event, state: State) -> bool:
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Does nothing: `RunLevers` calls the levers."""

    def state_dict(self) -> dict[str, Any]:
        """With DTensors, which only `WholeCheckpoints` can save."""
        return super().state_dict() | kept_state(type(self).__name__, self.lever)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Without the text that Composer adds."""
        shards = {} if self.planner is None else self.planner.levers.pop(type(self).__name__, {})
        self.lever.load_state_dict(joined({key: value for key, value in state.items() if key != "repr"}, shards))


class _RunCallback(ComposerCallback):
    """A callback's hooks and state; see `run_callback`."""

    callback: Callback
    run: ComposerRun

    @stops_nothing
    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in HOOKS:
            getattr(self.callback, HOOKS[event])(self.run)

    def state_dict(self) -> dict[str, Any]:
        return packed(kept_state(type(self).__name__, self.callback))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.callback.load_state_dict(copied(unpacked(state)))


def as_algorithms(levers: Levers, run: ComposerRun, planner: LoadPlanner | None = None) -> list[Algorithm]:
    """Levers as Composer's algorithms: one that runs all of them, and for each one that has its state.

    Args:
        levers: of the run.
        run: that they act in.
        planner: reads the tensors of their states where the checkpoint is sharded.
    """
    named = levers.by_names_of_states().items()
    return [RunLevers(levers, run), *(_lever_state(name, lever, planner) for name, lever in named)]


def _lever_state(name: str, lever: Lever, planner: LoadPlanner | None) -> Algorithm:
    """An algorithm that makes Composer save and load a lever's state under a name.

    Composer files states under the names of classes, so that each lever needs a class of its own name.
    """
    algorithm = _named(name, lever, _LeverState)()
    algorithm.lever, algorithm.planner = lever, planner
    return algorithm


def run_callback(callback: Callback, run: ComposerRun, name: str | None = None) -> ComposerCallback:
    """A callback as Composer's, under a name, or that of its class; see `_lever_state`."""
    adapted = _named(name or type(callback).__name__, callback, _RunCallback)()
    adapted.callback, adapted.run = callback, run
    return adapted


def callbacks_of(state: State) -> list[Callback]:
    """The recipe's callbacks among Composer's."""
    return [callback.callback for callback in state.callbacks if isinstance(callback, _RunCallback)]


def _named(name: str, hooks: Hooks, base: type) -> type:
    return type(name, (base,), {"__doc__": type(hooks).__doc__, "__qualname__": name})
