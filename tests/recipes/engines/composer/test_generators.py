"""Random numbers of a resumed run are those of the run that went on."""

import random

import numpy as np
import torch

from recipes.engines.composer.generators import Generators


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
