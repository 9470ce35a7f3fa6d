"""How much of a codebook a validation set uses."""

from __future__ import annotations

import torch
from torch import Tensor

from callbacks.counts import add_counts
from data.loading import WEIGHT
from data.system.log import log
from recipes.models.task import Task
from recipes.training import ranks
from recipes.training.callback import Callback
from recipes.training.run import Run


class Codebook(Callback):
    """Logs usage and perplexity of the codes of each validation set, over all its images on all ranks.

    Usage is the share of codes that occur at all. Perplexity is the exponential of the entropy of the codes'
    frequencies: the number of equally frequent codes that would carry as much information.
    """

    def __init__(self, task: Task, run_name: str) -> None:
        """
        Raises:
            ValueError: the model has no codebook.
        """
        if task.codes is None:
            raise ValueError(f"codebook: a {type(task).__name__} has no codes to count")
        self.codes = task.codes
        self.run_name = run_name
        self.counts = torch.zeros(0)

    def eval_start(self, run: Run) -> None:
        self.counts = torch.zeros(self.codes, dtype=torch.float64, device=run.device)

    def eval_after_forward(self, run: Run) -> None:
        add_counts(self.counts, run.outputs["codes"], run.batch.get(WEIGHT))

    def eval_end(self, run: Run) -> None:
        ranks.all_reduce(self.counts)
        used, perplexity = usage(self.counts)
        label = run.eval_label
        run.log({f"codebook/{label}/usage": used, f"codebook/{label}/perplexity": perplexity})
        log.info(
            f"{self.run_name}: {label} at batch {run.clock.batch}: {used:.1%} of {self.codes:,} codes used, "
            f"perplexity {perplexity:.1f}"
        )


def usage(counts: Tensor) -> tuple[float, float]:
    """The share of codes that occur, and the perplexity of their frequencies.

    Args:
        counts: (K,), how often each of K codes occurs.
    """
    frequencies = counts.double() / counts.sum().clamp(min=1)
    entropy = -torch.xlogy(frequencies, frequencies).sum()
    return (counts > 0).double().mean().item(), entropy.exp().item()
