"""A run without an engine, for tests of levers and callbacks: `FakeRun`, and `train` with all their hooks."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from recipes.engines.metrics import figures_of
from recipes.training import ranks
from recipes.training.clock import Clock
from recipes.training.levers import Levers
from recipes.training.microbatches import with_batch_means
from recipes.training.run import Run


class FakeRun(Run):
    """A run on the CPU whose clock the test sets, and which keeps what is logged.

    Attributes:
        logged: (batch, figures) of each call of `log`.
        settings: everything given to `log_settings`.
        images: (batch, name, images) of each call of `log_images`.
        scale: what `gradient_scale` returns.
        wraps: whether `module` is the task in DistributedDataParallel from `begin` on.
    """

    def __init__(self, task=None, duration="10ba", epoch_batches=None, precision="fp32", optimizer=None):
        self.task = torch.nn.Linear(2, 2) if task is None else task
        self.device = torch.device("cpu")
        self.precision = precision
        self.batch, self.outputs = {}, {}
        self.passes, self.pass_number = 1, 0
        self.loss = None
        self.eval_label, self.eval_figures = "", {}
        self.logged, self.settings, self.images = [], {}, []
        self.scale = 1.0
        self.wraps = False
        self.microbatch = None
        self.clock = Clock(0, 0, 0, duration, epoch_batches)
        self.module = self.task
        self._optimizer = optimizer

    def at(self, batch, samples=8):
        """Set the clock to the end of a batch of so many samples."""
        before = (batch - 1, (batch - 1) * samples, self.clock.epoch)
        self.clock = replace(self.clock, batch=batch, sample=batch * samples, before=before)
        return self

    @property
    def optimizer(self):
        if self._optimizer is None:
            self._optimizer = torch.optim.SGD(self.task.parameters(), lr=0.1)
        return self._optimizer

    def autocast(self):
        return nullcontext()

    def gradient_scale(self):
        return self.scale

    @contextmanager
    def new_parameters(self):
        yield
        self._optimizer = None

    def peak_rates_changed(self):
        """There is no schedule."""

    def set_microbatch(self, samples):
        self.microbatch = samples

    def log(self, figures):
        self.logged.append((self.clock.batch, dict(figures)))

    def log_settings(self, settings):
        self.settings |= settings

    def log_images(self, name, images):
        self.images.append((self.clock.batch, name, images))

    def values(self, name):
        """batch -> value, of everything logged under a name."""
        return {batch: figures[name] for batch, figures in self.logged if name in figures}


def train(run, data, callbacks=(), levers=(), microbatch=None, evals=None, eval_every=None, load=None):
    """Train a task by plain PyTorch, through all hooks of `recipes.training.hooks.Hooks` in their order.

    Args:
        run: a FakeRun; the loss of its task is `total`.
        data: the batches of an epoch, each a dict of tensors.
        callbacks, levers: in the order in which they act.
        microbatch: samples at once; None: the whole batch.
        evals: label -> batches of a validation set.
        eval_every: batches between two validations; there is one at the end, too.
        load: called between sharding and `loaded`.
    """
    levers = Levers(levers)

    def at(hook):
        levers.call(hook, run)
        for callback in callbacks:
            getattr(callback, hook)(run)

    levers.prepare(run)
    levers.compile(run)
    if load is not None:
        load()
    at("loaded")
    if run.wraps:
        run.module = DistributedDataParallel(run.task)
    run.microbatch = microbatch
    run.clock = replace(run.clock, epoch_batches=len(data))
    at("begin")
    while not run.clock.ended:
        at("before_data")
        run.batch = with_batch_means(data[run.clock.batch % len(data)], run.task, run.device)
        at("batch_start")
        _step(run, run.batch, levers, callbacks, at)
        at("step_end")
        at("after_save")
        if evals and (run.clock.ended or (eval_every and run.clock.batch % eval_every == 0)):
            for label, batches in evals.items():
                _evaluate(run, label, batches, at)
        if run.clock.batch % len(data) == 0:
            now = run.clock
            run.clock = replace(now, epoch=now.epoch + 1, before=(now.batch, now.sample, now.epoch))
            at("epoch_end")
            at("after_save")
    at("end")


def _step(run, batch, levers, callbacks, at):
    samples = len(next(iter(batch.values())))
    size = run.microbatch or samples
    parts = [{name: tensor[i : i + size] for name, tensor in batch.items()} for i in range(0, samples, size)]
    run.passes, run.pass_number = len(parts), -1
    run.optimizer.zero_grad()
    at("before_passes")
    total = torch.zeros(())
    for run.pass_number, run.batch in enumerate(parts):
        at("before_forward")
        waits = run.wraps and not run.last_pass
        with run.module.no_sync() if waits else nullcontext(), run.autocast():
            loss = run.module(run.batch)["total"] * (len(next(iter(run.batch.values()))) / samples)
            at("after_forward")
            at("before_backward")
            (loss * run.gradient_scale()).backward()
        total += loss.detach()
        at("after_backward")
    for parameter in run.task.parameters():
        if parameter.grad is not None and run.gradient_scale() != 1:
            parameter.grad /= run.gradient_scale()
    levers.finish_gradients(run)
    for callback in callbacks:
        callback.gradients_ready(run)
    run.optimizer.step()
    ranks.all_reduce(total)
    run.loss = total.item() / ranks.world_size()
    now = run.clock
    run.clock = replace(
        now,
        batch=now.batch + 1,
        sample=now.sample + samples * ranks.world_size(),
        before=(now.batch, now.sample, now.epoch),
    )


@torch.no_grad()
def _evaluate(run, label, batches, at):
    run.eval_label, run.eval_figures = label, {}
    run.task.eval()
    at("eval_start")
    found = []
    for run.batch in batches:
        at("eval_before_forward")
        run.outputs = run.task.evaluate(run.batch)
        at("eval_after_forward")
        found.append(run.outputs)
    for name, figure in figures_of(run.task).items():
        for outputs in found:
            figure.update(outputs)
        run.eval_figures[name] = figure.compute().item()
    at("eval_end")
    run.task.train()
