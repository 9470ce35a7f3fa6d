"""A run without an engine: what tests of single levers hand to them."""

from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from recipes.training.clock import Clock
from recipes.training.run import Run


class StandInRun(Run):
    """Holds what a test sets, and keeps what a lever logs in `figures` and `settings`."""

    def __init__(self, task=None, *, precision="fp32", on_gpu=False, batch=0, duration="10ba"):
        self.task = nn.Module() if task is None else task
        self.device = torch.device("cpu")
        self.precision = precision
        self.passes, self.pass_number = 1, 0
        self.now = Clock(batch=batch, sample=8 * batch, epoch=0, duration=duration)
        self.figures, self.settings, self.images, self.microbatches = {}, {}, {}, []
        self._on_gpu = on_gpu
        self._optimizer = None

    @property
    def on_gpu(self):
        """What the test says: levers decide by it, and tensors stay on the CPU."""
        return self._on_gpu

    @property
    def clock(self):
        return self.now

    @property
    def module(self):
        return self.task

    @property
    def optimizer(self):
        if self._optimizer is None:
            self._optimizer = torch.optim.SGD(self.task.parameters(), lr=0.1)
        return self._optimizer

    def autocast(self):
        return nullcontext()

    def gradient_scale(self):
        return 1.0

    @contextmanager
    def new_parameters(self):
        yield

    def set_microbatch(self, samples):
        self.microbatches.append(samples)

    def log(self, figures):
        self.figures.update(figures)

    def log_settings(self, settings):
        self.settings.update(settings)

    def log_images(self, name, images):
        self.images[name] = images
