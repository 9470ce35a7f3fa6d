"""What the frequencies of image tokens alone predict: the loss that a transformer must get below."""

from __future__ import annotations

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor

from recipes.models.autoregressive.task import Autoregressive


class Unigram(Callback):
    """Logs and prints, after each validation, its image tokens' cross-entropy under their frequencies in training.

    The frequencies are those of the batches since this process started, with one added to each count. A model that
    learned no more than how often each token comes has this loss; one that learned nothing has ln K.
    """

    def __init__(self, task: Autoregressive, run_name: str, *, column: str = "image") -> None:
        """
        Args:
            column: of the batch that holds the tokens.
        """
        self.codes = task.sizes["codes"]
        self.run_name = run_name
        self.column = column
        self.seen: Tensor | None = None  # (K,), counts of training tokens
        self.validated: Tensor | None = None  # (K,), counts of the validation set's

    def before_forward(self, state: State, logger: Logger) -> None:
        counts = self._counts(state)
        self.seen = counts if self.seen is None else self.seen + counts

    def eval_start(self, state: State, logger: Logger) -> None:
        self.validated = None

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        counts = self._counts(state)
        self.validated = counts if self.validated is None else self.validated + counts

    def eval_end(self, state: State, logger: Logger) -> None:
        if self.seen is None or self.validated is None:
            return
        seen, validated = self.seen.clone(), self.validated.clone()
        dist.all_reduce(seen)
        dist.all_reduce(validated)
        loss = unigram_loss(seen, validated)
        label = state.dataloader_label
        logger.log_metrics({f"metrics/{label}/unigram_loss": loss})
        if dist.get_global_rank() == 0:
            batch = state.timestamp.batch.value
            print(f"{self.run_name}: {label} at batch {batch}: frequencies alone would have {loss:.4f}", flush=True)

    def _counts(self, state: State) -> Tensor:
        return torch.bincount(state.batch[self.column].flatten(), minlength=self.codes)


def unigram_loss(seen: Tensor, validated: Tensor) -> float:
    """Nats a token of what was counted in `validated` (K,), under the frequencies of `seen` (K,) and one of each."""
    probability = (seen.double() + 1) / (seen.sum() + len(seen))
    return float(-(validated * probability.log()).sum() / validated.sum())
