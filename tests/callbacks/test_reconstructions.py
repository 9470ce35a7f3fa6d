"""Reconstructions show the same images in every grid, also after a resume."""

import torch

from callbacks.reconstructions import Reconstructions
from tests.callbacks.stand_ins import IMAGES, TOKENS, Everything
from tests.recipes.training.fake_run import FakeRun, train


def test_a_resumed_run_shows_the_same_images(tmp_path):
    first, other = (TOKENS | {"image": IMAGES["image"] + shift} for shift in (0, 1))

    def originals(data, state=None):
        """(images of the grid, state) after a run of two batches."""
        task = Everything()
        callback = Reconstructions(task, str(tmp_path), None, pictures=2)
        load = None if state is None else lambda: callback.load_state_dict(state)
        run = FakeRun(task, duration="2ba")
        train(run, data, [callback], load=load)
        ((_, _, images),) = run.images
        return torch.from_numpy(images[::2]), callback.state_dict()

    shown, state = originals([first, other])
    assert torch.equal(shown.permute(0, 3, 1, 2), first["image"][:2])
    again, _ = originals([other, first], state)
    assert torch.equal(again, shown)
    unlike, _ = originals([other, first], {})  # a checkpoint of an earlier version
    assert not torch.equal(unlike, shown)
