"""The hooks of a run: the methods of levers and callbacks that it calls, in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from recipes.training.run import Run

Kind = TypeVar("Kind", bound="Hooks")


class Hooks:
    """The base class of levers and callbacks. Its methods do nothing unless a subclass overrides them.

    A run calls the methods in this order. Only callbacks have `gradients_ready` and `after_save`; levers have four
    other methods in place of the first (see `recipes.training.lever.Lever`)::

        loaded
        begin
        for each batch:
            before_data, batch_start, before_passes
            for each microbatch:
                before_forward, after_forward, before_backward, after_backward
            gradients_ready         # averaged, clipped, as the optimizer will see them
            step_end                # the optimizer has stepped, and the clock has moved on
            after_save              # a checkpoint that is due has been saved
            for each validation set that is due:
                eval_start
                for each microbatch: eval_before_forward, eval_after_forward
                eval_end
            epoch_end               # after the last batch of an epoch
            after_save, validation  # as above
        end
    """

    def loaded(self, run: Run) -> None:
        """Called when the model has been sharded and the checkpoint, if there is one, has been loaded."""

    def begin(self, run: Run) -> None:
        """Called when training begins or resumes. From now on `run.module` is the module that is called."""

    def before_data(self, run: Run) -> None:
        """Called before the run fetches the next batch; with Composer, also where an epoch has no further one. Random
        numbers belong into another hook: those of a run that goes on continue when its first batch has been fetched."""

    def batch_start(self, run: Run) -> None:
        """Called when a batch has been fetched."""

    def before_passes(self, run: Run) -> None:
        """Called when the batch has been divided into `run.passes` microbatches and gradients have been cleared."""

    def before_forward(self, run: Run) -> None:
        """Called before the forward pass of a microbatch, which is on the device and transformed."""

    def after_forward(self, run: Run) -> None:
        """Called when the losses of a microbatch have been computed."""

    def before_backward(self, run: Run) -> None:
        """Called before the backward pass of a microbatch. `run.last_pass` is whether it completes the gradients."""

    def after_backward(self, run: Run) -> None:
        """Called after the backward pass of a microbatch."""

    def gradients_ready(self, run: Run) -> None:
        """Called before the optimizer's step, when gradients are final."""

    def step_end(self, run: Run) -> None:
        """Called after the optimizer's step, when the clock counts the batch."""

    def after_save(self, run: Run) -> None:
        """Called after `step_end` and `epoch_end` of all, when a checkpoint that is due has been saved, except at the
        end of the run. What takes long or may fail belongs here: it costs no training."""

    def epoch_end(self, run: Run) -> None:
        """Called after the last batch of an epoch, when the clock counts the epoch."""

    def eval_start(self, run: Run) -> None:
        """Called before validation on the set `run.eval_label`."""

    def eval_before_forward(self, run: Run) -> None:
        """Called before the forward pass of a validation microbatch, which is on the device and transformed."""

    def eval_after_forward(self, run: Run) -> None:
        """Called when `run.outputs` holds what the task's `evaluate` returned for `run.batch`."""

    def eval_end(self, run: Run) -> None:
        """Called after validation on a set. `run.eval_figures` holds the means."""

    def end(self, run: Run) -> None:
        """Called when the run has reached its length."""

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints: tensors and plain values. Called on every rank; the first rank's is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called on every rank, after sharding and before `loaded`.

        A lever copies the tensors that it keeps beyond `begin`, as these may lie in the checkpoint's file.
        """


def stops_nothing(step: Callable[..., None]) -> Callable[..., None]:
    """A method in which a loop of an engine's library calls hooks or the model. Such loops take a StopIteration, such
    as of a `next()` in a hook, for the end of the data, so that the run would end as if it were complete, or never."""

    @wraps(step)
    def called(*args: Any, **kwargs: Any) -> None:
        try:
            step(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("a hook or the model raised StopIteration") from error

    return called


def by_names_of_states(labelled: Iterable[tuple[str, Kind]]) -> dict[str, Kind]:
    """Levers or callbacks by the names of their states in checkpoints: the class, and the label too if several are of
    a class.

    Args:
        labelled: labels with the levers or callbacks.
    """
    labelled = list(labelled)
    kinds = Counter(type(hooks).__name__ for _, hooks in labelled)
    named = ((type(hooks).__name__, label, hooks) for label, hooks in labelled)
    return {kind if kinds[kind] == 1 else f"{kind} {label}": hooks for kind, label, hooks in named}
