"""The position of training data in checkpoints: what no run could go on from is refused when it is saved."""

import operator
import random
import tracemalloc

import numpy as np
import pytest
import torch

from recipes.engines.checkpoints import loader_state
from recipes.engines.checkpoints.loader_state import kept

STATES = (
    {"epoch": 1, "seen": 8},
    {"generator": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
    {"half": torch.ones(3, dtype=torch.bfloat16), "number": torch.tensor(3), "none": torch.zeros(0, 2).bool()},
    {"seen": {"train": [1, 2.5, None, "a"], 3: np.arange(3, dtype=np.uint32)}},
    {},
)


@pytest.mark.parametrize("state", STATES)
def test_what_checkpoints_may_hold_is_kept(state):
    assert kept(state) is state


@pytest.mark.parametrize(("seen", "reason"), [(np.int64(8), "numpy.*scalar"), (np.random.default_rng(0), "")])
def test_values_that_are_not_loaded_are_refused_when_they_are_saved(seen, reason):
    """A run with a position such as numpy.int64(8) saved checkpoints, none of which could be loaded."""
    with pytest.raises(ValueError, match=f"^data: the loader: state_dict returns 'seen' with a value .*{reason}"):
        kept({"epoch": 1, "seen": seen})
    with pytest.raises(ValueError, match="^data: the loader: state_dict returns an instance of NoneType; return a di"):
        kept(None)


def test_ranks_with_different_states_are_refused(monkeypatch):
    """All ranks went on with the samples of the first one."""
    sent = []

    def all_gather_object(found, own):
        sent.append(own)
        found[:] = [sent[0], own]

    monkeypatch.setattr(loader_state, "world_size", lambda: 2)
    monkeypatch.setattr(loader_state.dist, "all_gather_object", all_gather_object)
    for state in STATES:
        sent.clear()
        kept(state)
        kept(dict(reversed(state.items())))
        if state:
            with pytest.raises(ValueError, match="^data: state_dict of the loader returns something else on rank 1 "):
                kept(state | {next(iter(state)): "another"})


def test_ranks_may_have_a_set_in_another_order(monkeypatch):
    """Texts have another hash in each process: runs whose loaders keep sets of them ended at their first checkpoint."""
    one, other = {"done": {16, 0}}, {"done": {0, 16}}  # in one place of their tables, in the order in which they came
    assert one == other and repr(one) != repr(other)

    def all_gather_object(found, own):
        found[:] = [own, own] if not sent else [sent[0], own]
        sent.append(own)

    sent = []
    monkeypatch.setattr(loader_state, "world_size", lambda: 2)
    monkeypatch.setattr(loader_state.dist, "all_gather_object", all_gather_object)
    kept(one)
    kept(other)
    with pytest.raises(ValueError, match="^data: state_dict of the loader returns something else on rank 1 "):
        kept({"done": {0, 17}})


def test_the_order_of_many_samples_takes_no_lists(monkeypatch):
    """Lists and texts of them took 50 bytes per sample on each rank."""
    monkeypatch.setattr(loader_state, "world_size", lambda: 2)
    gather = lambda found, own: operator.setitem(found, slice(None), [own, own])  # noqa: E731
    monkeypatch.setattr(loader_state.dist, "all_gather_object", gather)
    state = {"order": torch.arange(200_000), "words": np.zeros(200_000, np.uint32)}
    tracemalloc.start()
    kept(state)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 8 * 200_000
