"""Parts of sets that are drawn for an epoch are those that streaming draws, with less memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming.base import dataset
from streaming.base.sampling import get_sampling

from data.encoded import drawn_parts
from tests.data.encoded.test_dataset import assert_same, copies, make_loader, write


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.integers(0, 200),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_the_parts_are_streamings(sizes, choose, granularity, use_epoch, wide):
    arguments = np.array(sizes, np.int64), choose, granularity, 17, 5, use_epoch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn_parts, "WIDE", 0 if wide else 1 << 32)
        found = drawn_parts.drawn_parts(*arguments)
    known = get_sampling(*arguments)
    assert found.tolist() == known.tolist() and found.dtype == known.dtype == np.int64


@pytest.mark.parametrize("choose", [1, 900_000])
def test_a_part_takes_four_bytes_per_sample_of_the_set(choose):
    sizes = np.full(1000, 1000, np.int64)
    tracemalloc.start()
    try:
        assert drawn_parts.drawn_parts(sizes, choose, 1, 17, 0, True).sum() == choose
        assert tracemalloc.get_traced_memory()[1] < 4.5 * sizes.sum()
    finally:
        tracemalloc.stop()


def test_epochs_of_a_part_are_the_librarys_and_not_drawn_by_it(tmp_path, monkeypatch):
    sets = write(tmp_path / "one", 43), write(tmp_path / "other", 21, seed=1)
    stock, fast = copies(tmp_path, *sets)
    for streams in stock, fast:
        for stream, proportion in zip(streams, (0.7, 0.3), strict=True):
            stream["proportion"] = proportion
    stock, fast = (make_loader(quick, streams, epoch_size=20) for quick, streams in ((False, stock), (True, fast)))
    known = [list(stock), list(stock)]
    monkeypatch.setattr(dataset, "get_sampling", lambda *_: pytest.fail("with 24 bytes per sample of the set"))
    for epoch in known:
        assert_same(epoch, list(fast))
    assert dataset.get_sampling is not drawn_parts.drawn_parts  # for other data sets
