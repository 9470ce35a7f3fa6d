"""How both engines average what a task's `evaluate` returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

from data.loading import WEIGHT
from recipes.models.task import Task, described


class Figure(Metric):
    """A figure of validation: a weighted sum of weighted means over all samples of a validation set on all ranks.

    Most figures are one mean, in which all samples have the same weight.
    """

    def __init__(self, terms: Mapping[str, float], weights: Mapping[str, str], exponential: bool = False) -> None:
        """
        Args:
            terms: names of results of `Task.evaluate`, and the factors of their means.
            weights: as `Task.eval_weights`.
            exponential: whether the figure is the exponential of this sum.
        """
        super().__init__()
        self.exponential = exponential
        self.terms = dict(terms)
        self.weights = dict(weights)
        # In 64 bits: added in 32, equal losses of 25,000 batches have a mean that is wrong in the fourth digit, and
        # from 2^24 samples on one more does not count.
        zeros = torch.zeros(len(terms), dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")
        self.add_state("totals", zeros.clone(), dist_reduce_fx="sum")

    def update(self, results: Mapping[str, Tensor], samples: Tensor | None = None) -> None:
        """Add the samples of a microbatch.

        Args:
            results: what `Task.evaluate` returned for them.
            samples: (B,), with which weight each sample counts; None: all with the same.

        Raises:
            ValueError: a result is missing, or is not one value per sample, or the weights are none per sample.
        """
        if samples is not None and samples.dim() != 1:  # (B, 1) would give each sample the weights of all
            raise ValueError(
                f"data: the entry {WEIGHT!r} of a batch is {described(samples)}; give a tensor of shape (B,)"
            )
        for number, name in enumerate(self.terms):
            values = _per_sample(results, name, samples)
            weight = torch.ones_like(values)
            if name in self.weights:
                weight = _per_sample(results, self.weights[name], samples)
            if samples is not None:
                weight = weight * samples
            self.sums[number] += (values * weight).sum()
            self.totals[number] += weight.sum()

    def compute(self) -> Tensor:
        """The figure, a scalar. In a sum, a mean whose samples all have a weight of 0 is 0. If that is so for all of
        its means, it is nan, as nothing is known: such as a contrastive model's accuracy over one image."""
        factors = self.sums.new_tensor(list(self.terms.values()))
        total = (factors * self.sums / self.totals.clamp(min=1e-6)).sum()
        total = torch.where(self.totals.any(), total, torch.nan)
        return total.exp() if self.exponential else total


def _per_sample(results: Mapping[str, Tensor], name: str, samples: Tensor | None) -> Tensor:
    """A result as 32-bit numbers."""
    found = results.get(name) if isinstance(results, Mapping) else None
    if not isinstance(found, Tensor) or found.dim() != 1 or (samples is not None and len(found) != len(samples)):
        raise ValueError(
            f"model: evaluate returns {described(found)} for `{name}`; return a tensor of shape (B,), one value per "
            "sample"
        )
    return found.float()


def figures_of(task: Task) -> dict[str, Figure]:
    """New figures of a task's validation, by name."""
    figures = {}
    for name in task.eval_names:
        of = task.eval_exponentials.get(name, name)
        figures[name] = Figure(task.eval_sums.get(of, {of: 1.0}), task.eval_weights, name in task.eval_exponentials)
    return figures
