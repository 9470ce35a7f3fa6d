"""Usage and perplexity of a codebook: of all of a validation set's codes at once, over all ranks."""

import math

import pytest
import torch

from callbacks.codebook import Codebook, usage
from data.loading import WEIGHT
from recipes.models.dvae.task import DiscreteAutoencoder
from recipes.models.task import Task
from recipes.training import ranks
from recipes.training.callback import Callback
from tests.recipes.training.fake_run import FakeRun


@pytest.mark.parametrize(
    ("counts", "used", "perplexity"),
    [([5, 5, 5, 5], 1.0, 4.0), ([0, 1, 0, 0], 0.25, 1.0), ([3, 3, 0, 0], 0.5, 2.0), ([0, 0, 0, 0], 0.0, 1.0)],
)
def test_usage(counts, used, perplexity):
    assert usage(torch.tensor(counts)) == (used, pytest.approx(perplexity))


def test_perplexity_is_the_exponential_of_the_entropy():
    counts = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(0))
    p = [count / counts.sum().item() for count in counts.tolist() if count]
    assert usage(counts)[1] == pytest.approx(math.exp(-sum(x * math.log(x) for x in p)))


def evaluate(callback, batches, label="val", weights=None):
    """What is logged of a validation set."""
    run = FakeRun(duration="100ba").at(30)
    run.eval_label = label
    callback.eval_start(run)
    for number, codes in enumerate(batches):
        run.outputs = {"codes": torch.tensor(codes)}
        run.batch = {} if weights is None else {WEIGHT: torch.tensor(weights[number])}
        callback.eval_after_forward(run)
    callback.eval_end(run)
    ((batch, figures),) = run.logged
    assert batch == 30
    return figures


@pytest.fixture
def task():
    return DiscreteAutoencoder(codes=8, hidden=4, blocks=1, initial=2)


def test_codes_are_counted_over_the_whole_set_and_anew_each_time(task, capsys):
    callback = Codebook(task, "name")
    assert isinstance(callback, Callback)
    one, other = [[[0, 1], [1, 0]]], [[[2, 2], [3, 3]]]
    # Each batch has two codes; together they are four. A mean of the batches' perplexities would be 2.
    for _ in range(2):
        metrics = evaluate(callback, [one, other])
        assert metrics == {"codebook/val/usage": 0.5, "codebook/val/perplexity": pytest.approx(4)}
    assert evaluate(callback, [one], "seen")["codebook/seen/perplexity"] == pytest.approx(2)
    line = capsys.readouterr().out.splitlines()[0]
    assert line == "name: val at batch 30: 50.0% of 8 codes used, perplexity 4.0"


def test_samples_count_by_their_weights(task):
    """A sample that is read twice counts half each time, and a blank one not at all."""
    codes = [[[0, 0], [0, 0]], [[1, 1], [2, 2]], [[5, 5], [5, 5]]]
    metrics = evaluate(Codebook(task, "name"), [codes], weights=[[0.5, 1.0, 0.0]])
    assert metrics == {"codebook/val/usage": 3 / 8, "codebook/val/perplexity": pytest.approx(3)}


def test_ranks_are_added_up(task, monkeypatch, capsys):
    def other_rank(counts):
        counts += torch.tensor([0, 0, 0, 0, 4, 0, 0, 0])

    monkeypatch.setattr(ranks, "all_reduce", other_rank)
    monkeypatch.setenv("RANK", "1")
    metrics = evaluate(Codebook(task, "name"), [[[[1, 1], [1, 1]]]])
    assert metrics == {"codebook/val/usage": 0.25, "codebook/val/perplexity": pytest.approx(2)}
    assert capsys.readouterr().out == ""


def test_a_model_without_codes():
    with pytest.raises(ValueError, match="codebook: a Task has no codes to count"):
        Codebook(Task(), "name")
