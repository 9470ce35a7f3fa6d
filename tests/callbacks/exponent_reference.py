"""What `exponents` should count: gradients computed once more beside a run, and counted by numpy one by one."""

import numpy as np
import torch

from callbacks.exponent_counts import COLUMNS, LEAST, NONFINITE, ZERO
from callbacks.exponents import Exponents
from recipes.algorithms.sixteen_bit.block_scaling import ScaledBranch
from recipes.training import ranks
from recipes.training.callback import Callback
from tests.recipes.algorithms.residual import WordTask
from tests.recipes.training.fake_run import FakeRun, train


def naive(arrays):
    """As `count_exponents`, of some arrays, one number at a time."""
    counts = [0] * COLUMNS
    for value in np.concatenate([array.ravel() for array in arrays]).astype(np.float64):
        if value == 0:
            counts[ZERO] += 1
        elif not np.isfinite(value):
            counts[NONFINITE] += 1
        else:
            counts[int(np.frexp(value)[1]) - 1 - LEAST + 1] += 1
    return counts


class Reference(Callback):
    """Before each forward pass computes this rank's gradients of the microbatch, which are half of the batch's.

    Attributes:
        counts: of each batch, those of each block's matrices.
    """

    def __init__(self, task, bad_batch=None):
        self.task, self.bad_batch = task, bad_batch
        self.counts = {}
        self.sums = None

    def before_passes(self, run):
        self.sums = None

    def before_forward(self, run):
        found = [[], []]
        matrices = [[p for p in layer.parameters() if p.ndim == 2] for layer in self.task.layers]
        loss = self.task(run.batch)["total"] * 0.5
        gradients = iter(torch.autograd.grad(loss, matrices[0] + matrices[1]))
        for block, parameters in enumerate(matrices):
            found[block] = [next(gradients) for _ in parameters]
        if self.sums is None:
            self.sums = found
        else:
            self.sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(self.sums, found, strict=True)]
        for layer in self.task.layers:
            if isinstance(layer.branch, ScaledBranch):
                layer.branch.gradients_filtered.zero_()  # what this pass added
        self.counts[run.clock.batch] = [
            naive([(g / getattr(layer.branch, "gradient_scale", 1.0)).numpy() for g in block])
            for layer, block in zip(self.task.layers, self.sums, strict=True)
        ]

    def before_backward(self, run):
        if run.clock.batch == self.bad_batch:
            self.task.layers[1].branch[1].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), torch.nan))
            self.bad_batch = None


def run(folder, levers, bad_batch=None, duration="6ba", every="2ba"):
    """A run in two microbatches of 4 samples per rank: gradients as `Reference` counts them, and the run.

    Args:
        folder: where `exponents` writes.
        levers: task -> list.
        bad_batch: in it block 1 gets gradients that are NaN.
    """
    task = WordTask()
    words = torch.randint(11, (128, 6), generator=torch.Generator().manual_seed(5))
    own = words[ranks.rank() :: ranks.world_size()]
    reference = Reference(task, bad_batch)
    fake = FakeRun(task, duration)
    fake.wraps = ranks.world_size() > 1
    data = [{"words": part} for part in own.split(8)]
    train(fake, data, [Exponents(task, str(folder), every=every), reference], levers(task), microbatch=4)
    return reference, fake


def counts_of(record):
    """Lists as `naive` makes them, from a file."""
    found = []
    for block in record["blocks"]:
        counts = [0] * COLUMNS
        counts[ZERO], counts[NONFINITE] = block["zeros"], block["nonfinite"]
        for exponent, count in block["exponents"].items():
            counts[int(exponent) - LEAST + 1] = count
        assert sum(counts) == block["elements"]
        found.append(counts)
    return found
