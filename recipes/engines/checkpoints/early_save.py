"""Checkpoints are saved before what may fail at the same batch: periodic callbacks and validation."""

from __future__ import annotations

import hashlib
import io
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from recipes.engines.checkpoints.files import CheckpointFiles
from recipes.engines.generators import own_generators
from recipes.training.callback import Callback
from recipes.training.clock import CheckpointInterval
from recipes.training.finite import is_worth_keeping
from recipes.training.lever import Lever
from recipes.training.ranks import all_reduce
from recipes.training.run import Run

OF_VALIDATION = ("eval_start", "eval_before_forward", "eval_after_forward", "eval_end")
SMALL = 2**16  # numbers of a tensor


class EarlySave:
    """Saves a checkpoint that is due before periodic callbacks draw, export and the like, and before validation.

    These may fail, for instance for lack of memory, and a cluster may kill the run in the midst of them. The next start
    then goes on after this batch, without what was cut off. If they change what the checkpoint has, but for parameters
    and large tensors, such as the state of a callback, a random number generator or a learning rate, it is saved again
    after them, so that a run goes on as if it had not stopped.

    At the end of a run nothing is saved before them: a run that has ended would not evaluate again.

    A checkpoint is also due when the newest one is older than a number of minutes, on the clock of any rank.
    """

    def __init__(
        self,
        run: Run,
        callbacks: Iterable[Callback],
        files: CheckpointFiles,
        every: str | None,
        minutes: float | None = None,
        levers: Iterable[Lever] = (),
    ) -> None:
        """
        Args:
            run: says where it is, and whether it is to stop.
            callbacks: of the run.
            files: where checkpoints lie.
            every: interval between checkpoints; None: only the end of the run.
            minutes: longest time between two checkpoints, and from the first batch to the first one; None: any.
            levers: of the run.
        """
        self._run = run
        self._callbacks = list(callbacks)
        # After the checkpoint, until it may be saved again, no hooks of levers are called but these.
        self._levers = [
            lever for lever in levers if any(getattr(type(lever), n) is not getattr(Lever, n) for n in OF_VALIDATION)
        ]
        self._files = files
        self._due = CheckpointInterval(every)
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._saved: bytes | None = None  # a digest of the states in the checkpoint of this batch

    def before(self, save: Callable[[], None]) -> None:
        """Save a checkpoint if one is due at this batch, or the run is to stop after it. Every rank must call it."""
        run, self._saved = self._run, None
        if math.isinf(run.save_from):  # the first batch of this process, which may have compiled the model
            run.save_from = time.monotonic() + self._seconds
        if run.clock.ended or run.clock.ends_with_epoch:
            return
        # In this order: the host waits while all weights are read, which must not happen in each batch.
        if (self._due(run.clock) or run.stopping or run.overdue) and is_worth_keeping(run):
            self._files.hold_copies()
            save()
            # Composer also asks at the end of an epoch, which is the same batch.
            run.overdue, run.save_from = False, time.monotonic() + self._seconds
            self._saved = self._digest()

    def after(self, save: Callable[[], None]) -> None:
        """Save the checkpoint again if a state has changed. Every rank must call it."""
        if self._saved is None:
            return
        changed = torch.tensor(int(self._saved != self._digest()), device=self._run.device)
        all_reduce(changed, "MAX")
        if changed:
            save()
        else:
            self._files.flush()
        self._files.copy_held()

    def _digest(self) -> bytes:
        run = self._run
        states = [
            [callback.state_dict() for callback in self._callbacks],
            own_generators(),
            [_small(lever.state_dict()) for lever in self._levers],
            [{**group, "params": None} for group in run.optimizer.param_groups],
            _small(list(run.task.buffers())),  # such as of an objective that counts what `evaluate` gives it
        ]
        file = io.BytesIO()
        torch.save(states, file)  # pickle writes the addresses of tensors
        return hashlib.blake2b(file.getvalue()).digest()


def _small(value: Any) -> Any:
    """A value without its large tensors, such as averages of weights, which would take as long as saving them."""
    if isinstance(value, dict):
        return {name: _small(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_small(inner) for inner in value]
    return None if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.numel() > SMALL) else value
