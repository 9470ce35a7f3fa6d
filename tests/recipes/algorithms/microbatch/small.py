"""A small task, its data and a device of any memory, for searches in one process and in two."""

import torch
from composer import DataSpec
from composer.utils import dist as composer_dist
from torch import nn
from torch.utils.data import DataLoader

from recipes.algorithms.microbatch.device_memory import Reading
from recipes.models.task import Task
from recipes.training.microbatches import samples_of, split

MB = 10**6


class FakeMemory:
    """A device on which a microbatch of m takes the larger of `floor` and `fixed` + m `each` bytes."""

    def __init__(self, usable=10_000 * MB, held=1_000 * MB, fixed=500 * MB, each=1_000 * MB, floor=0, total=None):
        self.held, self.fixed, self.each, self.floor, self.usable = held, fixed, each, floor, usable
        self.total = usable if total is None else total
        self.state, self.sizes = None, []

    def start(self):
        self.sizes.append(self.state.device_train_microbatch_size)

    def growth(self, size):
        return max(self.floor, self.fixed + size * self.each)

    def read(self, size=None):
        return Reading(self.held, self.growth(self.sizes[-1] if size is None else size), self.usable)


class Line(Task):
    """A task without noise: its gradient of a batch depends on the batch alone."""

    eval_names = ["loss"]

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def blocks(self):
        return [self.net]

    def forward(self, batch):
        return {"total": (self.net(batch["x"]) - batch["y"]).square().mean()}

    def evaluate(self, batch):
        return {"loss": (self.net(batch["x"]) - batch["y"]).square().mean(1)}


def data(batch=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 3, generator=generator, dtype=torch.float64)
    samples = [{"x": row, "y": row.sum().square()[None]} for row in x]
    loader = DataLoader(samples, batch_size=batch, sampler=composer_dist.get_sampler(samples))
    return DataSpec(loader, split_batch=split, get_num_samples_in_batch=samples_of)
