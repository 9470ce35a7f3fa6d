"""Random numbers of a resumed run are those of the run that went on."""

import random

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from recipes.engines.checkpoints.save_planner import SavePlanner
from recipes.engines.composer.generators import Generators
from recipes.engines.composer.load_planner import LoadPlanner


def draw():
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def test_generators_are_restored_at_the_first_batch_only():
    saved = Generators().state_dict()
    expected = draw(), draw()
    resumed = Generators()
    resumed.load_state_dict(saved)
    draw()
    resumed.after_dataloader(None, None)
    first = draw()
    resumed.after_dataloader(None, None)
    assert (first, draw()) == expected


def test_a_run_without_a_batch_passes_on_what_it_got():
    saved = Generators().state_dict()
    expected = draw()
    for _ in range(2):
        resumed = Generators()
        resumed.load_state_dict(saved)
        saved = resumed.state_dict()
    resumed.after_dataloader(None, None)
    assert draw() == expected


def test_a_new_run_keeps_its_own():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    Generators().after_dataloader(None, None)
    assert (torch.get_rng_state() == state).all()


def test_a_rank_asks_for_its_own_in_a_sharded_checkpoint(one_rank, monkeypatch):
    """The first rank collects what all write: the states of all ranks by all ranks would be their square."""
    states = [{"python": (number,), "torch": torch.zeros(2)} for number in range(3)]
    weight = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)))
    state = {"state": {"callbacks": {"Generators": {"generators": states}}}, "rng": states, "weight": weight}
    writes = []
    for first in (True, False):
        saves = SavePlanner()
        saves.set_up_planner(state, is_coordinator=first)
        writes.append(saves.create_local_plan())
    assert [item.index.fqn for item in writes[1].items] == [*writes[1].planner_data] == ["weight"]
    _, metadata = saves.create_global_plan(writes)
    assert len(metadata.planner_data) == len(metadata.state_dict_metadata) == 13

    monkeypatch.setattr("recipes.engines.composer.load_planner.rank", lambda: 1)
    loads = LoadPlanner(nn.Linear(2, 2))
    loads.set_up_planner(state, metadata)
    sent = loads.create_local_plan()
    assert not sent.items  # the first rank would collect the plans of all
    reads = {item.dest_index.fqn for item in loads.finish_plan(sent).items}
    own = [f"{above}.1.{name}" for above in ("state.callbacks.Generators.generators", "rng") for name in states[0]]
    assert reads == {"weight", *own}
