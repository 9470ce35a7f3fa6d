"""What callbacks are handed in a run, as small as it can be."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from recipes.models.task import Task
from recipes.training.lever import Lever
from tests.recipes.algorithms.residual import Block

CODES = 8
IMAGES = {"image": torch.arange(4 * 3 * 8 * 8).reshape(4, 3, 8, 8).to(torch.uint8)}
TOKENS = {"tokens": torch.arange(4 * 6).reshape(4, 6) % CODES}


class Everything(Task):
    """A model of images that has what each callback asks for: blocks, codes, a scheduled value, reconstructions."""

    eval_names = ("loss",)
    entry_points = ("reconstruct",)
    scheduled = ("temperature",)
    codes = CODES
    counted = {"tokens": CODES}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(nn.Linear(8, 8)) for _ in range(2))
        self.register_buffer("temperature", torch.tensor(1.0))

    def blocks(self):
        return list(self.layers)

    def reconstruct(self, images):
        for layer in self.layers:
            images = layer(images)
        return images

    def evaluate(self, batch):
        images = batch["image"] / 255
        loss = (self.reconstruct(images) - images).square().mean((1, 2, 3))
        return {"loss": loss, "codes": batch["tokens"]}

    def forward(self, batch):
        return {"total": self.evaluate(batch)["loss"].mean()}

    def export(self, folder):
        (folder / "first_weight").write_text(str(self.layers[0].branch.weight[0, 0].item()))


class Average(Lever):
    """A stand-in of ScheduledEMA, which begins after a batch; averaged weights are 0.01, and images of them finite."""

    decay, every = 0.99, 5

    def __init__(self, task, begun=3):
        self.task, self.begun = task, begun
        self.running = False
        self.contexts = []

    def watch(self, context):
        self.contexts.append(context)

    @contextmanager
    def applied(self):
        if not self.running:
            yield False
            return
        weights = [p.detach().clone() for p in self.task.parameters()]
        with torch.no_grad():
            for parameter in self.task.parameters():
                parameter.fill_(0.01)
        yield True
        with torch.no_grad():
            for parameter, weight in zip(self.task.parameters(), weights, strict=True):
                parameter.copy_(weight)

    def step_end(self, run):
        self.running = run.clock.batch >= self.begun
        with self.contexts[0]() if self.running and self.contexts else nullcontext():
            pass


class Scaling(Lever):
    """A stand-in of ResblockGradScaling with two blocks; in bad batches a gradient of the second is not finite."""

    def __init__(self, bad_batches=()):
        self.bad_batches = bad_batches
        self.skipped = 0
        self.nonfinite = torch.zeros(2, dtype=torch.int64)
        self.scales = SimpleNamespace(exponents=torch.full((2,), 13.0, dtype=torch.float64))

    def unscale_gradients(self, run):
        bad = run.clock.batch in self.bad_batches
        self.skipped += bad
        self.nonfinite = torch.tensor([0, int(bad)])
        self.scales.exponents += torch.tensor([0.001, -0.5 if bad else 0.001])


class Squares(Task):
    def __init__(self, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(2, outputs)

    def forward(self, batch):
        return {"total": self.layer(batch["x"]).square().mean()}
