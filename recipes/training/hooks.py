"""The moments of a run at which levers and callbacks act, in their order."""

from __future__ import annotations

from typing import Any

from recipes.training.run import Run


class Hooks:
    """Something that acts at moments of a run. Methods do nothing unless a subclass overrides them.

    A run calls the methods in this order. Only callbacks have `gradients_ready`; instead of it, levers have moments of
    their own (see `recipes.training.lever.Lever`)::

        loaded
        begin
        for each batch:
            before_data, batch_start, before_passes
            for each microbatch:
                before_forward, after_forward, before_backward, after_backward
            gradients_ready         # averaged, clipped, as the optimizer will see them
            step_end                # the optimizer has stepped, and the clock has moved on
            for each validation set that is due:
                eval_start
                for each microbatch: eval_before_forward, eval_after_forward
                eval_end
            epoch_end               # after the last batch of an epoch
        end
    """

    def loaded(self, run: Run) -> None:
        """The model is sharded, and the checkpoint, if there is one, is loaded."""

    def begin(self, run: Run) -> None:
        """Training begins, or resumes. From now on `run.module` is the module that is called."""

    def before_data(self, run: Run) -> None:
        """The run waits for the next batch."""

    def batch_start(self, run: Run) -> None:
        """A batch has arrived."""

    def before_passes(self, run: Run) -> None:
        """The batch is divided into `run.passes` microbatches, and the previous gradients are cleared."""

    def before_forward(self, run: Run) -> None:
        """A microbatch is on the device and transformed."""

    def after_forward(self, run: Run) -> None:
        """The microbatch's losses are computed."""

    def before_backward(self, run: Run) -> None:
        """The backward pass of a microbatch comes next; `run.last_pass` is whether it completes the gradients."""

    def after_backward(self, run: Run) -> None:
        """The backward pass of a microbatch is done."""

    def gradients_ready(self, run: Run) -> None:
        """Gradients are as the optimizer will see them."""

    def step_end(self, run: Run) -> None:
        """The optimizer has stepped, and the clock has moved on."""

    def epoch_end(self, run: Run) -> None:
        """An epoch is complete, and the clock counts it."""

    def eval_start(self, run: Run) -> None:
        """The validation set `run.eval_label` comes next."""

    def eval_before_forward(self, run: Run) -> None:
        """A microbatch of the validation set is on the device and transformed."""

    def eval_after_forward(self, run: Run) -> None:
        """`run.outputs` holds what the task's `evaluate` returned for `run.batch`."""

    def eval_end(self, run: Run) -> None:
        """The validation set is done; `run.eval_figures` holds its means."""

    def end(self, run: Run) -> None:
        """The run has reached its length."""

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: tensors and plain values. Called on every rank; the first rank's is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called on every rank, after sharding and before `loaded`."""
