"""What `exponents` should count: gradients computed once more beside a run, and counted by numpy, one after another."""

import numpy as np
import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader

from callbacks.exponent_counts import COLUMNS, LEAST, NONFINITE, ZERO
from callbacks.exponents import Exponents
from recipes.algorithms.gradients.order import in_gradient_order
from recipes.algorithms.sixteen_bit.block_scaling import ScaledBranch
from recipes.engines.composer.model import ComposerTask
from tests.recipes.algorithms.residual import Residual


class Task(Residual):
    eval_names: list[str] = []

    def forward(self, batch):
        logits = super().forward(batch["words"])
        wanted = (batch["words"] * 3 + 1) % 11
        return {"total": nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())}


def naive(arrays):
    """As `count_exponents`, of some arrays, a number at a time."""
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

    def before_train_batch(self, state, logger):
        self.sums = None

    def before_forward(self, state, logger):
        found = [[], []]
        matrices = [[p for p in layer.parameters() if p.ndim == 2] for layer in self.task.layers]
        loss = self.task(state.batch)["total"] * 0.5
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
        self.counts[state.timestamp.batch.value] = [
            naive([(g / getattr(layer.branch, "gradient_scale", 1.0)).numpy() for g in block])
            for layer, block in zip(self.task.layers, self.sums, strict=True)
        ]

    def before_backward(self, state, logger):
        if state.timestamp.batch.value == self.bad_batch:
            self.task.layers[1].branch[1].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), torch.nan))
            self.bad_batch = None


def run(folder, algorithms, bad_batch=None, duration="6ba", every="2ba"):
    """A run in two microbatches of 4 samples a rank: gradients as `Reference` counts them, and what was logged.

    Args:
        folder: where `exponents` writes.
        algorithms: task -> list.
        bad_batch: in it block 1 gets gradients that are NaN.
    """
    task = Task()
    words = torch.randint(11, (128, 6), generator=torch.Generator().manual_seed(5))
    data = [{"words": row} for row in words]
    reference = Reference(task, bad_batch)
    logger = InMemoryLogger()
    trainer = Trainer(
        model=ComposerTask(task),
        train_dataloader=DataLoader(data, batch_size=8, sampler=dist.get_sampler(data)),
        max_duration=duration,
        optimizers=torch.optim.SGD(task.parameters(), lr=0.1),
        algorithms=algorithms(task),
        algorithm_passes=[in_gradient_order],
        callbacks=[Exponents(task, str(folder), every=every), reference],
        loggers=logger,
        device="cpu",
        device_train_microbatch_size=4,
        precision="fp32",
        progress_bar=False,
        seed=3,
    )
    trainer.fit()
    return reference, logger


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
