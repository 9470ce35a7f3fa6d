"""Finds token ids of a loader of one's own that the model does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from data.encoded.dataset import EncodedDataset
from data.loading import Batch, Loading
from data.tokens import widen
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.ranks import rank
from recipes.training.run import Run

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # of which PyTorch finds no largest value


class TokenIds(Lever):
    """An id beyond a table of embeddings is an error of a GPU that names nothing, after which the process is lost.

    Batches are looked at on the host, where this takes microseconds. Components of this repository do so in their
    workers, where they can name the sample.
    """

    def __init__(self, ids: Mapping[str, range]) -> None:
        """
        Args:
            ids: which ones the model has, by entries of a batch.
        """
        self._ids = ids

    def batch_start(self, run: Run) -> None:
        """
        Raises:
            ValueError: the batch has another one.
        """
        _check(run.batch, self._ids, "data", f"batch {run.clock.batch}")


def looked_for(task: Task, loading: Loading) -> Mapping[str, range]:
    """The ids that a model has, by entries of a batch; none where the batches of a loader need no look."""
    encoded = isinstance(getattr(loading.loader, "dataset", None), EncodedDataset)
    # What is changed on the device is not looked at: it may be no id before.
    return {} if encoded or loading.on_device not in (None, widen) else task.token_ids


def look_at(task: Task, label: str, loading: Loading) -> Callable[[Batch], Batch]:
    """A function that each batch of a validation set passes through, on the host, and that raises as the lever does.

    Args:
        task: the model.
        label: of the validation set.
        loading: its batches.
    """
    ids = looked_for(task, loading)

    def looked(batch: Batch) -> Batch:
        _check(batch, ids, f"evals.{label}", "a batch")
        return batch

    return looked


def _check(batch: Batch, ids: Mapping[str, range], where: str, which: str) -> None:
    if not isinstance(batch, Mapping):
        return  # which is refused where it is divided
    for name, has in ids.items():
        tokens = batch.get(name)
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or not tokens.numel():
            continue  # what a model makes of it, only the model knows
        if tokens.device.type != "cpu":
            continue
        tokens = tokens.long() if tokens.dtype in UNSIGNED else tokens
        least, most = (end.item() for end in torch.aminmax(tokens))
        if has.start <= least and most < has.stop:
            continue
        place = ((tokens < has.start) | (tokens >= has.stop)).nonzero()[0].tolist()
        raise ValueError(
            f"{where}: the entry `{name}` of {which} on rank {rank()} has the token {tokens[tuple(place)].item()} in "
            f"its sample {place[0]}, and the model has those from {has.start} to {has.stop - 1}; correct the data, or "
            "give the model more"
        )
