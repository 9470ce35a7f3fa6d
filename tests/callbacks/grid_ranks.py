"""Run on two ranks by `lever_ranks`: ranks share the images that a callback draws."""

import numpy as np
import torch
import torch.distributed as dist

from callbacks.prompt_grid import PromptGrid
from recipes.models.task import Task
from tests.recipes.training.fake_run import FakeRun


class Decoder:
    """Takes grey values for images."""

    def to(self, device):
        return self

    def decode(self, part):
        assert len(part) <= 2
        return part[:, None, None, None].expand(-1, 3, 4, 4) / 255


class Numbers(PromptGrid):
    """Draws the prompts, which are grey values."""

    def prepare(self):
        assert dist.get_rank() == 0
        return Decoder(), torch.tensor([float(prompt) for prompt in self.prompts])

    def draw(self, numbers):
        self.drawn.append(numbers)
        return self.text[numbers]


def check_shared(folder):
    for prompts, copies, drawn in (
        (5, 1, ([[0, 1], [2]], [[3, 4], [4]])),
        (4, 1, ([[0, 1]], [[2, 3]])),
        (1, 1, ([[0]], [[0]])),
        (3, 2, ([[0, 1], [2]], [[0, 1], [2]])),  # a tensor parallel group draws the same images
    ):
        values = [10 * number for number in range(prompts)]
        grid = Numbers(Task(), str(folder), None, copies, [str(value) for value in values], None, None, batch=2)
        grid.drawn = []
        run = FakeRun(grid.task)
        grid.begin(run)
        images = grid.images(run)
        assert grid.drawn == drawn[dist.get_rank()]
        if dist.get_rank():
            assert images is None
        else:
            assert images.shape == (prompts, 4, 4, 3) and (images == np.array(values)[:, None, None, None]).all()


CHECKS = {"images shared": check_shared}
