"""A run's loaders as Lightning iterates over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from data.loading import Batch, Loading
from recipes.engines.lightning.run import LightningRun


class RunBatches:
    """The batches that are left of a run, over as many epochs as it takes: one long epoch for Lightning.

    Lightning would otherwise end epochs by rules of its own, and lose a batch or an epoch when a run is resumed. It
    fetches nothing ahead, because there is a length. The iterator is a generator because Lightning makes one more
    than it uses, and none may touch the data before it is used.
    """

    def __init__(
        self,
        loading: Loading,
        run: LightningRun,
        *,
        before_data: Callable[[], None],
        end_epoch: Callable[[], None],
        global_batch: int,
    ) -> None:
        """
        Args:
            loading: training batches.
            run: says where it is.
            before_data: called before each batch is taken from the loader.
            end_epoch: called if an epoch ended that the length of the loader did not announce.
            global_batch: number of samples per step, over all ranks.
        """
        self._loading = loading
        self._run = run
        self._before_data = before_data
        self._end_epoch = end_epoch
        self._global_batch = global_batch

    def __len__(self) -> int:
        """The largest number of batches that may be left; the run ends when its clock says so.

        It counts from where the run is: what is done may have been batches of another size, or longer epochs.
        """
        counts, per_epoch = self._run.counts, self._run.epoch_batches
        value, unit = self._run.clock.length
        left = value - self._run.clock.passed(unit)
        if unit == "ba":
            most = left
        elif not per_epoch:
            most = 2**31 if unit == "ep" else left / self._global_batch
        elif unit == "ep":
            most = math.ceil(left) * per_epoch - min(counts.batch_in_epoch, per_epoch)
        else:
            # Some epochs end with a smaller batch, and some leave samples out.
            samples = min(self._loading.samples or math.inf, per_epoch * self._global_batch)
            # The rest of the present epoch may have fewer samples than as many batches of later epochs.
            present = max(0, per_epoch - counts.batch_in_epoch) if counts.sample_in_epoch else 0
            most = present + math.ceil(left / samples) * per_epoch
        return max(1, math.ceil(most))

    def __iter__(self) -> Iterator[Batch]:
        run, empty = self._run, 0
        while not run.clock.ended:
            if not run.epoch_is_complete:  # it is where the run resumes from the very end of an epoch
                empty += 1
                for batch in self._rest_of_epoch():
                    empty = 0
                    yield batch
            # One empty epoch is possible: a loader that resumes at the end of an epoch may begin by ending it.
            if empty > 1 or run.epoch_batches == 0:
                raise ValueError("data: an epoch has no batches; give more samples, or a smaller training.global_batch")
            if run.counts.batch_in_epoch and not run.clock.ended:
                self._end_epoch()

    def _rest_of_epoch(self) -> Iterator[Batch]:
        """The batches from here to the end of the present epoch."""
        total = self._run.epoch_batches
        batches = iter(self._loading.loader)
        for _ in count() if total is None else range(total - self._run.counts.batch_in_epoch):
            self._before_data()
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was trained on. Every rank must call it."""
        return self._loading.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position. Every rank must call it, before the first batch is taken."""
        self._loading.loader.load_state_dict(state)


class EvalBatches:
    """The batches of a validation set. Of a `DataLoader` Lightning would say that it has too few workers, and that an
    `IterableDataset` should have no length."""

    def __init__(self, loading: Loading, look: Callable[[Batch], Batch]) -> None:
        """
        Args:
            loading: validation batches, equally many of equal sizes on every rank.
            look: called with each batch, on the host.
        """
        self._loader = loading.loader
        self._look = look

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._look, self._loader)
