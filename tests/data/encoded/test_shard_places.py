"""In which shard a sample is, as streaming finds it, without memory for each sample."""

import numpy as np
import pytest
from streaming.base.spanner import Spanner

from data.encoded.shard_places import ShardPlaces


@pytest.mark.parametrize("sizes", [[3], [1, 2000, 0, 0, 5, 1], [0, 4, 0], [384] * 20])
def test_samples_are_where_streaming_finds_them(sizes):
    sizes = np.array(sizes, np.int64)
    places, known = ShardPlaces(sizes), Spanner(sizes.copy())
    for sample in range(int(sizes.sum())):
        assert places[sample] == known[sample] and places[np.int64(sample)] == known[sample]
    for sample in -1, int(sizes.sum()):
        with pytest.raises(IndexError):
            places[sample]


def test_the_number_of_samples_costs_nothing():
    places = ShardPlaces(np.array([10**15, 0, 7], np.int64))  # streaming would take 8 petabytes
    assert places[10**15 - 1] == (0, 10**15 - 1) and places[10**15 + 6] == (2, 6)
