"""The loss of frequencies alone, by hand and over the batches of a run."""

import math
from types import SimpleNamespace

import pytest
import torch

from callbacks.unigram import Unigram, unigram_loss


def test_the_loss_of_frequencies():
    # Three of four tokens are 0: probabilities (3 + 1) / 6 and (1 + 1) / 6.
    loss = unigram_loss(torch.tensor([3, 1]), torch.tensor([1, 3]))
    assert loss == pytest.approx((math.log(6 / 4) + 3 * math.log(6 / 2)) / 4)
    assert unigram_loss(torch.zeros(8, dtype=torch.long), torch.ones(8)) == pytest.approx(math.log(8))


def test_batches_are_counted(capsys):
    callback = Unigram(SimpleNamespace(sizes={"codes": 4}), "run")
    state = SimpleNamespace(
        batch=None, dataloader_label="val", timestamp=SimpleNamespace(batch=SimpleNamespace(value=7))
    )
    logged = {}
    logger = SimpleNamespace(log_metrics=logged.update)
    for tokens in ([[0, 0], [1, 0]], [[3, 0], [0, 0]]):
        state.batch = {"image": torch.tensor(tokens)}
        callback.before_forward(state, logger)
    for _ in range(2):  # each validation anew
        callback.eval_start(state, logger)
        for tokens in ([[0, 1]], [[0, 2]]):
            state.batch = {"image": torch.tensor(tokens)}
            callback.eval_before_forward(state, logger)
        callback.eval_end(state, logger)
    expected = unigram_loss(torch.tensor([6, 1, 0, 1]), torch.tensor([2, 1, 1, 0]))
    assert logged == {"metrics/val/unigram_loss": pytest.approx(expected)}
    assert f"run: val at batch 7: frequencies alone would have {expected:.4f}" in capsys.readouterr().out
