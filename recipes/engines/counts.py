"""How much of a run is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from data.loading import Loading


@dataclass(frozen=True)
class Counts:
    """How much of a run is done.

    Attributes:
        batch: optimizer steps.
        sample: samples trained on, over all ranks.
        epoch: complete passes over the data.
        batch_in_epoch: optimizer steps of the present epoch.
        sample_in_epoch: samples of the present epoch, over all ranks.
    """

    batch: int = 0
    sample: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0

    @classmethod
    def names(cls) -> list[str]:
        """The names of the counts, which are Composer's, too."""
        return [field.name for field in fields(cls)]

    def after_batch(self, samples: int) -> Counts:
        """The counts after one more step on this many samples."""
        return Counts(
            batch=self.batch + 1,
            sample=self.sample + samples,
            epoch=self.epoch,
            batch_in_epoch=self.batch_in_epoch + 1,
            sample_in_epoch=self.sample_in_epoch + samples,
        )

    def after_epoch(self) -> Counts:
        """The counts once the present epoch is complete."""
        return replace(self, epoch=self.epoch + 1, batch_in_epoch=0, sample_in_epoch=0)


def in_present_batches(counts: Counts, loading: Loading, *, global_batch: int, ranks: int) -> Counts:
    """Counts of a checkpoint, with as many batches of the present epoch done as leave those that the loader has left.

    They change only if the checkpoint's run had batches of another size. The end of an epoch is counted in batches.

    Args:
        counts: of the checkpoint; zeros where a run begins.
        loading: training batches.
        global_batch: number of samples per step, over all ranks.
        ranks: number of processes, or groups of them, that read different samples.
    """
    total = epoch_batches(loading)
    if total is None or loading.samples is None or not counts.batch_in_epoch:
        return counts
    # Of a rank, as `data.encoded.dataset.EncodedLoader` counts them.
    samples, batch = max(0, math.ceil((loading.samples - counts.sample_in_epoch) / ranks)), global_batch // ranks
    left = samples // batch if loading.loader.drop_last else math.ceil(samples / batch)
    return replace(counts, batch_in_epoch=max(0, total - left))


def epoch_batches(loading: Loading) -> int | None:
    """Number of batches per epoch, on each rank; None if the data has no known end."""
    try:
        return len(loading.loader)
    except (TypeError, NotImplementedError):  # an iterable without a length
        return None
