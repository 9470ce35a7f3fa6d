"""What a callback of your own must define."""

import numpy as np
import pytest
import torch

from recipes.training.callback import PeriodicCallback
from recipes.training.run import check_figures, check_images


class Nothing(PeriodicCallback):
    def acts(self, run):
        raise AssertionError("not called")


def test_a_periodic_callback_that_defines_no_act_would_do_nothing():
    with pytest.raises(ValueError, match=r"^Nothing \(.*test_callback\) does nothing: define its method act\(run\)"):
        Nothing("2ba")


def test_a_periodic_callback_may_act_in_another_hook():
    class AtSteps(PeriodicCallback):
        def step_end(self, run):
            if self.due(run.clock):
                raise AssertionError("not called")

    AtSteps("2ba")


@pytest.mark.parametrize(
    "figures, message",
    [
        (None, "got an instance of NoneType; give a dict"),
        ({"good": 1, "bad": "text"}, "the figure 'bad' is an instance of str; give one number"),
        ({"bad": None}, "the figure 'bad' is an instance of NoneType; give one number"),
        ({"bad": {"x": 1}}, "the figure 'bad' is an instance of dict; give one number"),
        ({"bad": torch.zeros(3)}, r"the figure 'bad' is of shape \(3,\); give one number"),
        ({("loss", 1): 1.0}, r"the name \('loss', 1\) is an instance of tuple; give texts"),
        ({"bad": np.zeros(0)}, r"the figure 'bad' is of shape \(0,\); give one number"),
    ],
)
def test_figures_that_no_logger_can_write(figures, message):
    with pytest.raises(ValueError, match=f"^run.log: {message}"):
        check_figures(figures)


def test_figures_that_loggers_can_write():
    figures = {"a": 1, "b": 2.0, "c": torch.ones(1), "d": np.float32(3), "e": True, "f": np.zeros(())}
    assert check_figures(figures) is figures


@pytest.mark.parametrize(
    "images, message",
    [
        (np.zeros((2, 3, 4, 4), np.uint8), r"of shape \(2, 3, 4, 4\) and uint8"),
        (np.zeros((4, 4, 3), np.uint8), r"of shape \(4, 4, 3\) and uint8"),
        (np.zeros((0, 4, 4, 3), np.uint8), r"of shape \(0, 4, 4, 3\) and uint8"),
        (torch.zeros(2, 4, 4, 3), r"of shape \(2, 4, 4, 3\) and float32"),
        ([np.zeros((4, 4, 3), np.uint8)], "an instance of list"),
    ],
)
def test_images_that_no_logger_can_write(images, message):
    with pytest.raises(ValueError, match=rf"^run.log_images: 'samples' is {message}; give \(N, H, W, 3\) of uint8"):
        check_images("samples", images)


def test_images_that_loggers_can_write():
    for images in (np.zeros((2, 4, 4, 3), np.uint8), torch.zeros(1, 4, 4, 3, dtype=torch.uint8)):
        assert check_images("samples", images) is images
