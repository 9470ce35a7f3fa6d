"""The loss of a model that predicts tokens by their frequencies: a transformer must get below it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from callbacks.counts import add_counts
from data.loading import WEIGHT
from data.system.log import log
from recipes.models.task import Task
from recipes.training import ranks
from recipes.training.callback import Callback
from recipes.training.run import Run


class Unigram(Callback):
    """Logs the cross-entropy of each validation set's predicted tokens under their frequencies in training.

    The frequencies are those of the run's batches so far, with one added to each count. A model that has learned only
    how often each token occurs has this loss; one that has learned nothing has the logarithm of the number of tokens
    in its softmax: in `autoregressive`, text and image tokens together.
    """

    def __init__(self, task: Task, run_name: str, copies: int, *, column: str = "image") -> None:
        """`copies` is the number of ranks that compute the same samples, `training.tensor_parallel`.

        Args:
            column: entry of the batch that holds the tokens: image for `autoregressive`, tokens for `language`.

        Raises:
            ValueError: the model does not predict such tokens.
        """
        if column not in task.counted:
            known = ", ".join(task.counted) or "none"
            raise ValueError(f"unigram: column is {column}, and the tokens that the model predicts are: {known}")
        self.codes = task.counted[column]
        self.first = task.counted_from.get(column, 0)
        self.run_name = run_name
        self.copies = copies
        self.column = column
        self.seen: Tensor | None = None  # (K,), counts of this rank's training tokens
        self.validated: Tensor | None = None  # (K,) float64, counts of the validation set's

    def loaded(self, run: Run) -> None:
        if self.seen is not None:  # a run that resumes at the end of an epoch may validate before its first batch
            self.seen = self.seen.to(run.device)

    def before_forward(self, run: Run) -> None:
        tokens = self._predicted(run)
        if self.seen is None:
            self.seen = tokens.new_zeros(self.codes)
        add_counts(self.seen, tokens)

    def eval_start(self, run: Run) -> None:
        self.validated = None

    def eval_before_forward(self, run: Run) -> None:
        tokens = self._predicted(run)
        if self.validated is None:
            self.validated = torch.zeros(self.codes, dtype=torch.float64, device=tokens.device)
        add_counts(self.validated, tokens, run.batch.get(WEIGHT))

    def eval_end(self, run: Run) -> None:
        if self.seen is None or self.validated is None:
            return
        seen, validated = self._seen_by_all(), self.validated.clone()
        ranks.all_reduce(validated)
        loss = unigram_loss(seen, validated)
        label = run.eval_label
        run.log({f"metrics/{label}/unigram_loss": loss})
        log.info(f"{self.run_name}: {label} at batch {run.clock.batch}: frequencies alone would have {loss:.4f}")

    def state_dict(self) -> dict[str, Any]:
        """The counts of all ranks, which load on any number of ranks. Every rank must call it."""
        return {} if self.seen is None else {"seen": self._seen_by_all().cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the counts of a checkpoint, on the first rank, which has those of its copies, too."""
        if "seen" in state:
            self.seen = state["seen"] * (self.copies if ranks.is_first_rank() else 0)

    def _predicted(self, run: Run) -> Tensor:
        """The tokens of the batch that the loss is a mean over."""
        return run.batch[self.column][:, self.first :]

    def _seen_by_all(self) -> Tensor:
        seen = self.seen.clone()
        ranks.all_reduce(seen)
        return seen // self.copies


def unigram_loss(seen: Tensor, validated: Tensor) -> float:
    """Cross-entropy of counted tokens under the frequencies of others, in nats per token.

    Args:
        seen: (K,), counts that the frequencies are taken from, after one is added to each.
        validated: (K,), counts of the tokens that are predicted.
    """
    probability = (seen.double() + 1) / (seen.sum() + len(seen))
    return float(-(validated * probability.log()).sum() / validated.sum())
