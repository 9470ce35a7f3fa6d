"""The loss of frequencies alone, by hand and over the batches of a run."""

import math
from types import SimpleNamespace

import pytest
import torch

from callbacks.unigram import Unigram, unigram_loss
from data.loading import WEIGHT
from recipes.models.language.task import Language
from tests.recipes.training.fake_run import FakeRun

TASK = SimpleNamespace(counted={"image": 4}, counted_from={})


def test_the_loss_of_frequencies():
    # Three of four tokens are 0: probabilities (3 + 1) / 6 and (1 + 1) / 6.
    loss = unigram_loss(torch.tensor([3, 1]), torch.tensor([1, 3]))
    assert loss == pytest.approx((math.log(6 / 4) + 3 * math.log(6 / 2)) / 4)
    assert unigram_loss(torch.zeros(8, dtype=torch.long), torch.ones(8)) == pytest.approx(math.log(8))


def test_batches_are_counted(capsys):
    callback = Unigram(TASK, "run", 1)
    run = FakeRun().at(7)
    run.eval_label = "val"
    for tokens in ([[0, 0], [1, 0]], [[3, 0], [0, 0]]):
        run.batch = {"image": torch.tensor(tokens)}
        callback.before_forward(run)
    for _ in range(2):  # each validation anew
        callback.eval_start(run)
        for tokens in ([[0, 1], [3, 3]], [[0, 2], [3, 3]]):
            run.batch = {"image": torch.tensor(tokens), WEIGHT: torch.tensor([1.0, 0.0])}
            callback.eval_before_forward(run)
        callback.eval_end(run)
    expected = unigram_loss(torch.tensor([6, 1, 0, 1]), torch.tensor([2, 1, 1, 0]))
    assert run.logged == [(7, {"metrics/val/unigram_loss": pytest.approx(expected)})] * 2
    assert f"run: val at batch 7: frequencies alone would have {expected:.4f}" in capsys.readouterr().out


def test_only_predicted_tokens_are_counted():
    """The first token of a row of packed texts is none: it was the last of the row before."""
    task = Language(positions=3, vocabulary=4, layers=1, width=8, heads=1)
    callback, run = Unigram(task, "run", 1, column="tokens"), FakeRun().at(7)
    run.eval_label, run.batch = "val", {"tokens": torch.tensor([[3, 0, 1, 1], [3, 0, 0, 2]])}
    callback.before_forward(run)
    assert callback.seen.tolist() == [3, 2, 1, 0]
    callback.eval_start(run)
    callback.eval_before_forward(run)
    callback.eval_end(run)
    counts = torch.tensor([3, 2, 1, 0])
    assert run.logged == [(7, {"metrics/val/unigram_loss": pytest.approx(unigram_loss(counts, counts))})]


def test_a_resumed_run_goes_on_counting(monkeypatch):
    def callback():
        return Unigram(TASK, "run", 1)

    whole, run = callback(), FakeRun()
    assert whole.state_dict() == {}
    for tokens in ([[0, 1]], [[3, 3]]):
        run.batch = {"image": torch.tensor(tokens)}
        whole.before_forward(run)
    state = whole.state_dict()
    assert state["seen"].tolist() == [1, 1, 0, 2]
    first, second, earlier = callback(), callback(), callback()
    first.load_state_dict(state)
    earlier.load_state_dict({})  # a checkpoint that has no counts
    monkeypatch.setattr("recipes.training.ranks.is_first_rank", lambda: False)
    second.load_state_dict(state)
    for resumed in (first, second, earlier):
        resumed.before_forward(run)
    assert first.seen.tolist() == [1, 1, 0, 4]
    assert second.seen.tolist() == earlier.seen.tolist() == [0, 0, 0, 2]
    assert state["seen"].tolist() == [1, 1, 0, 2]


def test_ranks_that_compute_the_same_samples_count_them_once(monkeypatch):
    """Of `training.tensor_parallel`, also where a run goes on from a checkpoint."""
    first, second = (Unigram(TASK, "run", 2) for _ in range(2))
    monkeypatch.setattr("recipes.training.ranks.all_reduce", lambda counts: counts.add_(second.seen))
    run, state = FakeRun(), {"seen": torch.tensor([5, 0, 0, 1])}
    first.load_state_dict(state)
    with monkeypatch.context() as patch:
        patch.setattr("recipes.training.ranks.is_first_rank", lambda: False)
        second.load_state_dict(state)
    run.batch = {"image": torch.tensor([[0, 3, 3]])}
    for callback in (first, second):
        callback.before_forward(run)
    assert first.state_dict()["seen"].tolist() == [6, 0, 0, 3]


def test_a_run_that_resumes_at_the_end_of_an_epoch_validates_before_its_first_batch():
    """Its counts, which come from the host, are then where those of the validation set are."""
    callback, run = Unigram(TASK, "run", 1), FakeRun()
    run.device = torch.device("meta")
    callback.load_state_dict({"seen": torch.tensor([1, 1, 0, 2])})
    callback.loaded(run)
    run.batch = {"image": torch.zeros(1, 2, dtype=torch.long, device=run.device)}
    callback.eval_start(run)
    callback.eval_before_forward(run)
    assert callback.seen.device == callback.validated.device
    Unigram(TASK, "run", 1).loaded(run)  # a new run


def test_tokens_that_the_model_does_not_predict():
    with pytest.raises(ValueError, match="column is image, and the tokens that the model predicts are: tokens"):
        Unigram(SimpleNamespace(counted={"tokens": 4}, counted_from={"tokens": 1}), "run", 1)
