"""Weights of validation samples: means over a set do not depend on the number of ranks, although samples repeat."""

import numpy as np
import pytest
from streaming import Stream
from streaming.base.batching import generate_work
from streaming.base.world import World

from data.encoded.dataset import open_loader
from data.latents import LatentDataset
from data.loading import WEIGHT, Placement
from tests.data.encoded.test_dataset import write

WORLDS = [(1, 1, 1), (1, 2, 1), (1, 4, 2), (1, 5, 3), (2, 4, 1), (4, 8, 2)]  # nodes, ranks per node, workers per rank


def opened(folder, batch=4, **stream):
    return LatentDataset(
        streams=[Stream(local=str(folder), **stream)],
        resolution=32,
        text="text",
        batch_size=batch,
        shuffle=False,
        weighted=True,
    )


@pytest.mark.parametrize("count", [3, 23, 64])
@pytest.mark.parametrize("repeat", [1.0, 2.0, 1.5])
def test_each_sample_counts_as_often_as_the_epoch_has_it(tmp_path, count, repeat):
    dataset = opened(write(tmp_path / "set", count), repeat=repeat)
    _, epoch = dataset.resample_streams(0)
    wanted = np.bincount(epoch, minlength=count)
    assert wanted.sum() == int(count * repeat)
    for world in WORLDS:
        dataset.num_canonical_nodes = dataset.initial_physical_nodes = world[0]
        dataset._parallel_worker_world = World(*world, 0)
        read = generate_work("random", dataset, dataset._parallel_worker_world, 0, 0)
        read = read[read >= 0]
        weights = dataset.weights(0)
        sums = np.bincount(read, weights[read], minlength=count)
        np.testing.assert_allclose(sums, wanted, rtol=1e-6)  # weights have 24 bits
        assert len(read) >= wanted.sum()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_the_weights_of_their_samples(tmp_path, workers):
    loader = open_loader(opened(write(tmp_path / "set", 6), repeat=2.0), Placement(4, training=False), workers, False)
    for _ in range(2):
        assert sorted(len(batch[WEIGHT]) for batch in loader) == [4, 4, 4]
    assert all((batch[WEIGHT] == 1).all() for batch in loader)


def test_training_batches_hold_none(tmp_path):
    dataset = LatentDataset(
        streams=[Stream(local=str(write(tmp_path / "set", 4)))], resolution=32, text="text", batch_size=4, shuffle=True
    )
    assert WEIGHT not in next(iter(open_loader(dataset, Placement(4, training=True), 0, False)))
