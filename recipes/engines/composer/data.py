"""A run's loaders as Composer takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from composer.core import DataSpec
from torch.utils.data import DataLoader, IterableDataset

from data.loading import Batch, Loading
from recipes.training.microbatches import samples_of, split


class LoaderAsDataset(IterableDataset):
    """A loader of a component of one's own as a data set of whole batches.

    Composer keeps the position of `loader.dataset` and not the loader's, so that a run that resumes would read from the
    beginning; and it refuses to divide data sets with an index over ranks, which the loader has done.
    """

    def __init__(self, loader: DataLoader) -> None:
        """
        Args:
            loader: see `Loading`; in training with `state_dict` and `load_state_dict`.
        """
        self._loader = loader
        self._resumed = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        batches, resumed = 0, self._resumed
        self._resumed = False
        for batches, batch in enumerate(self._loader, 1):  # noqa: B007
            yield batch
        # Composer takes as many batches as the length says. A loader that ends its epoch after the last one does so at
        # the next call, which is an empty epoch only where the checkpoint was written at the end of one.
        if not batches and not resumed:
            yield from self._loader

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The loader's position; Composer's count of samples is not needed."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._resumed = True


def data_spec(loading: Loading, copies: int = 1, *, training: bool) -> DataSpec:
    """A loader as Composer takes it.

    Args:
        loading: batches.
        copies: number of ranks that compute the same samples, each of which counts a share of them.
        training: whether its position is kept in checkpoints.
    """
    loader = loading.loader
    dataset = loader.dataset
    kept = not hasattr(loader, "state_dict") or hasattr(dataset, "state_dict")
    if not (kept if training else isinstance(dataset, IterableDataset)):
        # With a generator of its own, as each iterator draws a number.
        loader = DataLoader(LoaderAsDataset(loader), batch_size=None, generator=torch.Generator())
    return DataSpec(
        loader,
        microbatch_transforms=loading.on_device,
        split_batch=split,
        get_num_samples_in_batch=samples_of if copies == 1 else lambda batch: samples_of(batch) / copies,
    )
