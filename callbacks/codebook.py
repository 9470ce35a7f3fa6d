"""How much of a codebook a validation set uses."""

from __future__ import annotations

import torch
import torch.distributed
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor, nn


class Codebook(Callback):
    """Logs usage and perplexity of the codes of each validation set, over all its pictures on all ranks.

    Usage is the share of codes that occur at all. Perplexity is the exponential of the entropy of the codes'
    frequencies: the number of codes that would carry as much if all were used alike.
    """

    def __init__(self, task: nn.Module, run_name: str) -> None:
        """
        Raises:
            ValueError: the model has no codebook.
        """
        if task.codes is None:
            raise ValueError(f"codebook: a {type(task).__name__} has no codes to count")
        self.codes = task.codes
        self.run_name = run_name
        self.counts = torch.zeros(0)

    def eval_start(self, state: State, logger: Logger) -> None:
        self.counts = state.device.tensor_to_device(torch.zeros(self.codes, dtype=torch.int64))

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        self.counts += torch.bincount(state.outputs["codes"].flatten(), minlength=self.codes)

    def eval_end(self, state: State, logger: Logger) -> None:
        dist.all_reduce(self.counts)  # the sum
        used, perplexity = usage(self.counts)
        label = state.dataloader_label
        logger.log_metrics({f"codebook/{label}/usage": used, f"codebook/{label}/perplexity": perplexity})
        if dist.get_global_rank() == 0:
            batch = state.timestamp.batch.value
            print(
                f"{self.run_name}: {label} at batch {batch}: {used:.1%} of {self.codes:,} codes used, "
                f"perplexity {perplexity:.1f}",
                flush=True,
            )


def usage(counts: Tensor) -> tuple[float, float]:
    """Share of the codes that occur, and perplexity of their frequencies, from (K,) counts."""
    frequencies = counts.double() / counts.sum().clamp(min=1)
    entropy = -torch.xlogy(frequencies, frequencies).sum()
    return (counts > 0).double().mean().item(), entropy.exp().item()
