"""Finds token ids of a loader of one's own that the model does not have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
        for name, ids in self._ids.items():
            tokens = run.batch.get(name)
            if not isinstance(tokens, Tensor) or tokens.is_floating_point() or not tokens.numel():
                continue  # what a model makes of it, only the model knows
            if tokens.device.type == "cpu":
                self._check(run, name, tokens.long() if tokens.dtype in UNSIGNED else tokens, ids)

    def _check(self, run: Run, name: str, tokens: Tensor, ids: range) -> None:
        least, most = (end.item() for end in torch.aminmax(tokens))
        if ids.start <= least and most < ids.stop:
            return
        wrong = (tokens < ids.start) | (tokens >= ids.stop)
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"data: the entry `{name}` of batch {run.clock.batch} on rank {rank()} has the token "
            f"{tokens[tuple(place)].item()} in its sample {place[0]}, and the model has those from {ids.start} to "
            f"{ids.stop - 1}; correct the data, or give the model more"
        )
