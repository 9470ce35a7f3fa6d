"""Reconstructions show the same images in every grid, also after a resume."""

import pytest
import torch

from callbacks.reconstructions import Reconstructions
from tests.callbacks.stand_ins import IMAGES, TOKENS, Everything
from tests.recipes.training.fake_run import FakeRun, train


def test_a_resumed_run_shows_the_same_images(tmp_path):
    first, other = (TOKENS | {"image": IMAGES["image"] + shift} for shift in (0, 1))

    def originals(data, state=None):
        """(images of the grid, state) after a run of two batches."""
        task, modes = Everything(), []
        reconstruct = task.reconstruct
        task.reconstruct = lambda images: modes.append(task.training) or reconstruct(images)
        callback = Reconstructions(task, str(tmp_path), None, pictures=2)
        load = None if state is None else lambda: callback.load_state_dict(state)
        run = FakeRun(task, duration="2ba")
        train(run, data, [callback], load=load)
        ((_, _, images),) = run.images
        assert not modes[-1] and task.training
        return torch.from_numpy(images[::2]), callback.state_dict()

    shown, state = originals([first, other])
    assert torch.equal(shown.permute(0, 3, 1, 2), first["image"][:2])
    again, _ = originals([other, first], state)
    assert torch.equal(again, shown)
    unlike, _ = originals([other, first], {})  # a checkpoint of an earlier version
    assert not torch.equal(unlike, shown)


@pytest.mark.parametrize("microbatch", [None, 3, 1])
@pytest.mark.parametrize("pictures", [3, 9])
def test_the_first_images_are_those_of_the_first_batch_in_any_microbatches(tmp_path, microbatch, pictures):
    """If that has fewer images, no grid has more: all show the same ones."""
    task = Everything()
    run = FakeRun(task, duration="2ba")
    callback = Reconstructions(task, str(tmp_path), None, every="1ba", pictures=pictures)
    train(run, [TOKENS | {"image": IMAGES["image"] + shift} for shift in (0, 1)], [callback], microbatch=microbatch)
    for _, _, images in run.images:
        assert torch.equal(torch.from_numpy(images[::2]).permute(0, 3, 1, 2), IMAGES["image"][:pictures])
    assert len(run.images) == 2
