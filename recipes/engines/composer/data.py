"""A run's loaders as Composer takes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from composer.core import DataSpec
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from data.loading import Batch, Loading
from recipes.engines.check_loaders import takes_counts
from recipes.training.microbatches import samples_of, split


class LoaderAsDataset(IterableDataset):
    """A loader of a component of one's own as a data set of whole batches.

    Composer keeps the position of `loader.dataset` and not the loader's, so that a run that resumes would read from the
    beginning; and it refuses to divide data sets with an index over ranks, which the loader has done.
    """

    def __init__(self, loader: DataLoader, batch_in_epoch: Callable[[], int]) -> None:
        """
        Args:
            loader: see `Loading`; in training with `state_dict` and `load_state_dict`.
            batch_in_epoch: returns how many batches of the present epoch Composer has counted.
        """
        self._loader = loader
        self._batch_in_epoch = batch_in_epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = 0
        for batches, batch in enumerate(self._loader, 1):  # noqa: B007
            yield batch
        # Composer takes as many batches as the length says. A loader that ends its epoch after the last one does so at
        # the next call, or when the run resumes, and Composer would count an epoch that it has counted before.
        if not batches and not self._batch_in_epoch():
            yield from self._loader

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The loader's position; Composer's count of samples is not needed."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


def data_spec(
    loading: Loading,
    copies: int = 1,
    batch_in_epoch: Callable[[], int] | None = None,
    look: Callable[[Batch], Batch] | None = None,
) -> DataSpec:
    """A loader as Composer takes it.

    Args:
        loading: batches.
        copies: number of ranks that compute the same samples, each of which counts a share of them.
        batch_in_epoch: see `LoaderAsDataset`; None: of a validation set, whose position no checkpoint keeps.
        look: called with each batch, on the host.
    """
    loader = loading.loader
    dataset = loader.dataset
    if batch_in_epoch is None:
        is_composers = isinstance(dataset, IterableDataset)
    else:
        is_composers = takes_counts(dataset) or not hasattr(loader, "state_dict")
    if not is_composers:
        # With a generator of its own, as each iterator draws a number.
        batches = LoaderAsDataset(loader, batch_in_epoch or (lambda: 0))
        loader = DataLoader(batches, batch_size=None, generator=torch.Generator())
    # The first tensor of the microbatch that `on_device` has made, and its samples. It does not keep it in memory.
    last: list[tuple[weakref.ref[Tensor], int]] = []

    def on_device(batch: Batch) -> Batch:
        samples = samples_of(batch)
        made = loading.on_device(batch)
        first = _first(made)
        last[:] = [] if first is None else [(weakref.ref(first), samples)]
        return made

    def samples(batch: Batch) -> int | float:
        """Composer also asks it of what `on_device` made, which may have entries for the microbatch as a whole."""
        found = next((samples for first, samples in last if first() is _first(batch) is not None), None)
        found = samples_of(batch) if found is None else found
        return found if copies == 1 else found / copies

    return DataSpec(
        loader,
        batch_transforms=look,
        microbatch_transforms=None if loading.on_device is None else on_device,
        split_batch=split,
        get_num_samples_in_batch=samples,
    )


def _first(batch: Any) -> Tensor | None:
    values = batch.values() if isinstance(batch, Mapping) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)
