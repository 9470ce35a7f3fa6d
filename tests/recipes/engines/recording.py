"""Runs of either engine, with what each batch gave."""

import hashlib
import importlib

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recipes.algorithms.averaging.average import reshard
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.sharding import shards
from recipes.training.callback import Callback
from recipes.training.microbatches import samples_of


class Recorder(Callback):
    """Keeps losses, learning rates, digests of the weights, figures of validation and the ends of epochs."""

    def __init__(self, with_digests=True, with_moments=True):
        self.with_digests, self.with_moments = with_digests, with_moments  # shards are gathered for each
        self.losses, self.rates, self.digests = [], [], []  # one per batch
        self.evals = []  # (batch, label, figures)
        self.epochs = []  # (epochs, batches) done
        self.sizes = []  # samples of this rank's batches, as callbacks see them after the step
        self.samples = 0  # that the run has counted
        self.synchronised = []  # for each backward pass under DDP, whether it averages, and whether it should
        self.weights = {}
        self.average = {}
        self.moments = {}
        self.bucket_views = None  # whether gradients are views of DDP's buckets; None without DDP

    def begin(self, run):
        if isinstance(run.module, DistributedDataParallel):
            self.bucket_views = run.module.gradient_as_bucket_view

    def before_backward(self, run):
        if isinstance(run.module, DistributedDataParallel):
            self.synchronised.append((run.module.require_backward_grad_sync, run.last_pass))

    def step_end(self, run):
        self.sizes.append(samples_of(run.batch))
        reshard(run.task)  # where samples were drawn, FSDP keeps gathered parameters, of 16 bits
        self.losses.append(run.loss)
        self.rates.append(run.optimizer.param_groups[0]["lr"])
        if not self.with_digests:
            return
        digest = hashlib.blake2b(digest_size=16)
        for parameter in run.task.parameters():
            digest.update(whole(parameter).numpy().tobytes())
        self.digests.append(digest.hexdigest())

    def eval_end(self, run):
        self.evals.append((run.clock.batch, run.eval_label, dict(run.eval_figures)))

    def epoch_end(self, run):
        self.epochs.append((run.clock.epoch, run.clock.batch))

    def end(self, run):
        self.samples = run.clock.sample
        reshard(run.task)
        for name, parameter in run.task.named_parameters():
            self.weights[name] = whole(parameter).clone()
            for key, value in run.optimizer.state[parameter].items() if self.with_moments else ():
                if isinstance(value, torch.Tensor):
                    self.moments[f"{name}: {key}"] = whole(value).clone()
        for lever in self.levers:
            if isinstance(lever, ScheduledEMA):
                self.average = {name: whole(tensor).clone() for name, tensor in lever.average.tensors().items()}


def whole(tensor):
    """A tensor that may be sharded, on the host."""
    tensor = tensor.detach()
    return (shards.whole(tensor) if isinstance(tensor, DTensor) else tensor).cpu()


def record(engine, recipe, recorder=None):
    """Train a recipe as recipes/train.py does, and give what was recorded."""
    trainers = importlib.import_module(f"recipes.engines.{engine}.trainer")
    recorder = recorder or Recorder()

    def add(parts):
        parts.callbacks["recorder"] = recorder
        recorder.levers, recorder.callbacks = parts.levers, parts.callbacks

    trainer = trainers.build_trainer(recipe, add)
    trainer.fit()
    trainer.close()
    return recorder


def differences(one, other):
    """Largest absolute differences over the batches that both recorded, the last ones."""
    batches = min(len(one.losses), len(other.losses))
    evals = min(len(one.evals), len(other.evals))
    pairs = zip(one.evals[-evals:], other.evals[-evals:], strict=True)
    assert [a[:2] for a in one.evals[-evals:]] == [b[:2] for b in other.evals[-evals:]]
    return {
        "batches": batches,
        "losses": max(abs(a - b) for a, b in zip(one.losses[-batches:], other.losses[-batches:], strict=True)),
        "rates": max(abs(a - b) for a, b in zip(one.rates[-batches:], other.rates[-batches:], strict=True)),
        "validation": max(abs(a[2][name] - b[2][name]) for a, b in pairs for name in a[2]),
        **{kind: _largest(getattr(one, kind), getattr(other, kind)) for kind in ("weights", "average", "moments")},
    }


def _largest(one, other):
    assert set(one) == set(other)  # the average is gathered to the first rank alone
    return max(((one[name] - other[name]).abs().max().item() for name in one), default=0.0)


def assert_bit_equal(one, other):
    """Every batch that both recorded, and everything at the end, is the same in every bit."""
    batches = min(len(one.losses), len(other.losses))
    assert one.losses[-batches:] == other.losses[-batches:]
    assert one.rates[-batches:] == other.rates[-batches:]
    assert one.sizes[-batches:] == other.sizes[-batches:] and one.samples == other.samples
    assert one.digests[-batches:] == other.digests[-batches:]
    evals, epochs = min(len(one.evals), len(other.evals)), min(len(one.epochs), len(other.epochs))
    assert evals and one.evals[-evals:] == other.evals[-evals:]
    assert one.epochs[len(one.epochs) - epochs :] == other.epochs[len(other.epochs) - epochs :]
    for kind in ("weights", "average", "moments"):
        a, b = getattr(one, kind), getattr(other, kind)
        assert set(a) == set(b) and a
        assert all(torch.equal(a[name], b[name]) for name in a), kind
