"""How much of a run is done: batches are counted in those of the present size."""

import math

import pytest

from data.loading import Loading
from recipes.engines.counts import Counts, epoch_batches, in_present_batches


class Loader:
    """A number of batches."""

    def __init__(self, batches, drop_last=True):
        self.batches, self.drop_last = batches, drop_last

    def __len__(self):
        return self.batches


@pytest.mark.parametrize(
    ("samples", "before", "seen", "global_batch", "left"),
    [
        (40, 8, 16, 8, 3),
        (44, 8, 40, 8, 0),
        (40, 4, 16, 8, 3),
        (40, 8, 32, 4, 2),
        (40, 4, 16, 16, 1),  # the last 8 are left out
        (40, 4, 28, 16, 0),  # the last 12 are left out
        (60, 14, 28, 16, 2),
        (44, 8, 40, 4, 1),  # which batches of 8 would have left out
        (44, 8, 40, 16, 0),
        (20, 4, 32, 8, 0),  # of another set, which has fewer
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_with_batches_of_another_size(samples, before, seen, global_batch, left, ranks):
    loading = Loading(Loader(batches=samples // global_batch), samples=samples)
    counts = Counts(batch=30, sample=100 + seen, epoch=2, batch_in_epoch=seen // before, sample_in_epoch=seen)
    now = in_present_batches(counts, loading, global_batch=global_batch, ranks=ranks)
    assert epoch_batches(loading) - now.batch_in_epoch == left
    assert before != global_batch or now == counts
    assert now.batch == 30 and now.sample_in_epoch == seen


@pytest.mark.parametrize(("seen", "global_batch", "left"), [(16, 8, 1), (22, 8, 0), (8, 8, 2), (12, 8, 2), (16, 4, 2)])
def test_a_last_batch_that_is_smaller_counts(seen, global_batch, left):
    loading = Loading(Loader(batches=-(-22 // global_batch), drop_last=False), samples=22)
    counts = Counts(batch_in_epoch=1, sample_in_epoch=seen)
    now = in_present_batches(counts, loading, global_batch=global_batch, ranks=1)
    assert epoch_batches(loading) - now.batch_in_epoch == left


@pytest.mark.parametrize(
    ("samples", "seen", "ranks", "global_batch", "left"),
    [(43, 40, 2, 4, 1), (43, 42, 2, 4, 0), (40, 16, 3, 9, 2), (40, 34, 3, 9, 0)],
)
def test_what_is_left_on_ranks_that_do_not_divide_it(samples, seen, ranks, global_batch, left):
    """As many batches as the loader has left. With one more, a run would take the first batch of the next epoch for the
    last one of this epoch, and go on with the epoch after that."""
    loading = Loading(Loader(batches=math.ceil(samples / ranks) // (global_batch // ranks)), samples=samples)
    counts = Counts(batch_in_epoch=1, sample_in_epoch=seen)
    now = in_present_batches(counts, loading, global_batch=global_batch, ranks=ranks)
    assert (
        epoch_batches(loading) - now.batch_in_epoch
        == left
        == len(range(seen, samples, ranks)) // (global_batch // ranks)
    )


def test_a_run_that_begins_or_reads_a_stream_counts_as_it_did():
    for loader, counts in [(Loader(3), Counts(batch=6, epoch=2)), (iter([]), Counts(batch_in_epoch=2))]:
        assert in_present_batches(counts, Loading(loader, samples=6), global_batch=2, ranks=1) == counts


def test_counts_go_on():
    counts = Counts().after_batch(8).after_batch(5)
    assert counts == Counts(batch=2, sample=13, batch_in_epoch=2, sample_in_epoch=13)
    assert counts.after_epoch() == Counts(batch=2, sample=13, epoch=1)
    assert all(isinstance(getattr(Counts(), name), int) for name in Counts.names())
