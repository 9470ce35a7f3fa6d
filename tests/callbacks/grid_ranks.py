"""Run on two ranks by `lever_ranks`: ranks share the images that a callback draws."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from callbacks.prompt_grid import PromptGrid
from callbacks.sample_grid import SampleGrid
from data.encoded.manifest import Manifest
from data.loading import Loading
from recipes.algorithms.sharding.shard import shard
from recipes.config.build import build, encoders_of
from recipes.config.recipe import Recipe, load_config
from recipes.models.task import Task
from tests.recipes.training.fake_run import FakeRun

PROMPTS = ["a dot", "a star", "a wall", "dots", "stars"]


class Decoder:
    """Takes grey values for images."""

    def to(self, device):
        return self

    def decode(self, part):
        assert len(part) <= 2
        return part[:, None, None, None].expand(-1, 3, 4, 4) / 255


class Numbers(PromptGrid):
    """Draws the prompts, which are grey values."""

    component = "numbers"

    def prepare(self):
        assert dist.get_rank() == 0
        return Decoder(), torch.tensor([float(prompt) for prompt in self.prompts])

    def draw(self, numbers):
        assert not self.task.training
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


def check_diffusion(folder):
    """Two ranks draw what one rank does, each with the whole U-Net (as under DDP) or with shards of it (FSDP2)."""
    recipe = load_config(folder.parent / "unet.yaml", [], Recipe)
    manifest = Manifest.read(Path(recipe.data.args["streams"]["train"].args["path"]))
    generator = torch.Generator().manual_seed(1)
    null_text = torch.randn(12, 16, generator=generator).half()
    loading = Loading(loader=None, manifest=manifest, resolution=16, null_text=null_text)

    def images(sharded, copies, batch):
        torch.manual_seed(0)
        task = build(recipe.model)
        for parameter in task.parameters():  # the last layer would begin with zeros
            parameter.data += 0.1 * torch.randn_like(parameter)
        if sharded:
            shard(task, init_device_mesh("cpu", (2,)))
        encoders = partial(encoders_of, manifest)
        grid = SampleGrid(task, str(folder), loading, encoders, None, copies, prompts=PROMPTS, steps=2, batch=batch)
        run = FakeRun(task)
        grid.begin(run)
        return grid.images(run)

    # With two copies each rank draws all images, as one alone does. With one copy, the images of a batch of two are
    # others, and their sums may be rounded in another order.
    for batch, levels in ((1, 0), (2, 1)):
        alone = images(False, 2, batch)
        for sharded in (False, True):
            shared = images(sharded, 1, batch)
            if dist.get_rank() == 0:
                assert np.abs(shared.astype(int) - alone).max() <= levels, (sharded, batch)
        if dist.get_rank() == 0:
            apart = [np.abs(one.astype(int) - other).mean() for one, other in zip(alone, alone[1:], strict=False)]
            assert min(apart) > 10, apart  # no image could be taken for the next one


CHECKS = {"images shared": check_shared, "images of a diffusion model shared": check_diffusion}
