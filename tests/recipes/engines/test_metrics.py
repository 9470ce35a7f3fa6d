"""Figures of validation against plain averages over all samples."""

import math

import pytest
import torch

from recipes.engines.metrics import Figure, figures_of
from recipes.models.task import Task

PARTS = [
    {"loss": torch.tensor([1.0, 5.0]), "size": torch.tensor([3, 1]), "other": torch.tensor([2.0, 4.0])},
    {"loss": torch.tensor([9.0]), "size": torch.tensor([0]), "other": torch.tensor([6.0])},
]


def value_of(figure):
    for part in PARTS:
        figure.update(part)
    return figure.compute().item()


def test_a_mean_of_samples():
    assert value_of(Figure({"loss": 1.0}, {})) == pytest.approx(5)


def test_a_weighted_mean():
    assert value_of(Figure({"loss": 1.0}, {"loss": "size"})) == pytest.approx((3 * 1 + 5) / 4)


def test_a_sum_of_means_of_different_weights():
    assert value_of(Figure({"loss": 0.25, "other": 2.0}, {"loss": "size"})) == pytest.approx(0.25 * 2 + 2 * 4)


def test_an_exponential_is_that_of_the_whole_mean():
    assert value_of(Figure({"loss": 1.0}, {}, exponential=True)) == pytest.approx(math.exp(5))


def test_a_mean_without_any_weight():
    """Is not known. In a sum with others that are, it is 0."""
    figure, whole = Figure({"loss": 1.0}, {"loss": "size"}), Figure({"loss": 1.0, "other": 0.5}, {"loss": "size"})
    for one in (figure, whole):
        one.update(PARTS[1])
    assert math.isnan(figure.compute()) and whole.compute() == 3


def test_weights_of_samples_and_of_results_multiply():
    figure = Figure({"loss": 1.0}, {"loss": "size"})
    figure.update(PARTS[0], samples=torch.tensor([0.5, 1.0]))
    assert figure.compute().item() == pytest.approx((0.5 * 3 * 1 + 5) / (0.5 * 3 + 1))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), ()])
def test_weights_that_are_not_of_each_sample_are_refused(shape):
    """Weights (B, 1) gave each sample those of all."""
    with pytest.raises(
        ValueError, match="^data: the entry 'weight' of a batch is a tensor of shape .*; give a tensor of"
    ):
        Figure({"loss": 1.0}, {}).update(PARTS[0], torch.ones(shape))


def test_results_in_16_bits_are_added_in_32():
    """As bf16 numbers the sum and the number of samples would be rounded to 300."""
    figure = Figure({"loss": 1.0}, {})
    figure.update({"loss": torch.tensor([1.0] * 300 + [2.0], dtype=torch.bfloat16)})
    assert figure.compute().item() == pytest.approx(302 / 301, rel=1e-6)


def test_a_sample_counts_also_after_millions_of_others():
    figure = Figure({"loss": 1.0}, {})
    figure.sums.fill_(2.0**24)
    figure.totals.fill_(2.0**24)
    for _ in range(5):
        figure.update({"loss": torch.tensor([3.0])})
    assert figure.compute().item() == pytest.approx((2**24 + 15) / (2**24 + 5), rel=1e-9)


def test_equal_losses_of_many_batches_have_their_mean():
    """In 32 bits, it would be 3.0998."""
    figure = Figure({"loss": 1.0}, {})
    for _ in range(5000):
        figure.update({"loss": torch.tensor([3.1, 3.1])})
    assert figure.compute().item() == pytest.approx(3.1, rel=1e-6)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"loss": torch.ones(3).mean()}, r"a tensor of shape \(\) and dtype float32 for `loss`;"),
        ({"loss": torch.ones(3, 1)}, r"a tensor of shape \(3, 1\) and dtype float32 for `loss`"),
        ({"loss": 1.0}, "an instance of float for `loss`"),
        ({"los": torch.ones(3)}, "nothing for `loss`"),
        (torch.ones(3), "nothing for `loss`"),
    ],
)
def test_results_that_are_not_of_each_sample_are_refused(results, message):
    """A mean would count samples that only fill up a batch, and weigh batches of all sizes alike."""
    with pytest.raises(ValueError, match=f"model: evaluate returns {message}"):
        Figure({"loss": 1.0}, {}).update(results, torch.tensor([1.0, 1.0, 0.0]))


def test_figures_of_a_task():
    task = Task()
    task.eval_names, task.eval_weights = ["loss", "both", "perplexity"], {"loss": "size"}
    task.eval_sums, task.eval_exponentials = {"both": {"loss": 0.5, "other": 0.5}}, {"perplexity": "both"}
    figures = figures_of(task)
    assert list(figures) == ["loss", "both", "perplexity"]
    assert value_of(figures["perplexity"]) == pytest.approx(math.exp(3))
    assert value_of(figures["loss"]) == pytest.approx(2) and value_of(figures["both"]) == pytest.approx(3)


@pytest.mark.slow
def test_pictures_that_ranks_cannot_share_equally(two_ranks):
    two_ranks("figures of pictures")
