"""Run on two ranks by `lever_ranks`: figures of validation sets of pictures that the ranks cannot share equally."""

import pytest
import torch.distributed as dist

from data.loading import WEIGHT, Placement
from data.pictures import pictures
from recipes.engines.metrics import Figure
from tests.data.test_pictures import Numbered


def mean_of(source, rank, world):
    """The mean over the set of the red channel and, per batch, how many pictures there are."""
    figure, sizes = Figure({"red": 1.0}, {}), []
    placement = Placement(4, False, rank, world)
    for batch in pictures(placement, {}, source=source, resolution=8, tokens=6, workers=0).loader:
        assert batch["tokens"].shape == (len(batch[WEIGHT]), 6)
        figure.update({"red": batch["image"][:, 0].float().mean(dim=(1, 2))}, batch[WEIGHT])
        sizes.append(len(batch["image"]))
    return figure.compute().item(), sizes


def check_pictures(folder):
    for source, batches in {
        Numbered(3, 7): [4, 4, 4, 2],  # two shards, and one
        Numbered(1, 5, reject=(1, 3)): [3],  # three pictures, and none
    }.items():
        alone, _ = mean_of(source, 0, 1)
        shared, sizes = mean_of(source, dist.get_rank(), 2)
        assert sizes == batches
        assert alone == pytest.approx(shared, rel=1e-6) and alone > 0
    with pytest.raises(ValueError, match="the validation set has no usable image"):
        mean_of(Numbered(1, 2, reject=(0, 1)), dist.get_rank(), 2)


CHECKS = {"figures of pictures": check_pictures}
