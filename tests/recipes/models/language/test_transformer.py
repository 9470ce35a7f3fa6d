"""GPT-2's transformer: causal, counted, initialised and tied as published."""

import math

import pytest
import torch

from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.models.language.task import Language
from recipes.models.language.transformer import TextTransformer
from tests.recipes.config.test_recipe import ROOT

SIZES = {"layers": 2, "width": 16, "heads": 4, "positions": 6, "vocabulary": 12}
# Shoeybi et al. 2019, table 1: layers, width, heads, billions of parameters, devices.
PUBLISHED = {
    "1b": (40, 1536, 16, 1.2, 1),
    "2b": (54, 1920, 20, 2.5, 2),
    "4b": (64, 2304, 24, 4.2, 4),
    "8b": (72, 3072, 32, 8.3, 8),
}


@pytest.fixture
def network():
    torch.manual_seed(0)
    return TextTransformer(**SIZES, dropout=0.0).double()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_sizes(name):
    recipe = load_config(ROOT / "yamls" / f"gpt2_{name}.yaml", [], Recipe, [])
    layers, width, heads, billions, devices = PUBLISHED[name]
    task = build_on_meta(recipe.model)
    # The table of tokens, which is one for both ends; positions; 12 d^2 + 13 d in each layer; the last norm.
    wanted = (51200 + 1024) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert sum(p.numel() for p in task.parameters()) == wanted and round(wanted / 1e9, 1) == billions
    assert task.network.blocks[0].branch.head_width == width // heads == 96
    assert recipe.training.tensor_parallel == devices
    task.tensor_plan().check(devices, 64)


def test_a_token_is_predicted_from_earlier_ones_only(network):
    tokens = torch.arange(6)[None] % 12
    before = network(tokens)
    tokens[0, 4] = 11
    after = network(tokens)
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.isclose(before[:, 4:], after[:, 4:]).all()


def test_the_attention_equals_a_softmax_by_hand(network):
    q, k, v = torch.randn(3, 2, 4, 6, 4, dtype=torch.float64)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    torch.testing.assert_close(network.attend(q, k, v), scores.softmax(-1) @ v)


def test_weights_begin_as_published():
    torch.manual_seed(0)
    network = TextTransformer(layers=3, width=128, heads=4, positions=64, vocabulary=512)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:
            wanted = 1.0 if name.endswith("norm.weight") else 0.0
            assert (parameter == wanted).all(), name
        else:
            wanted = 0.02 / math.sqrt(6) if name.endswith(("out.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.03), name


def test_the_table_has_the_gradients_of_both_ends():
    torch.manual_seed(0)
    task = Language(**SIZES, dropout=0.0).double()
    batch = {"tokens": torch.randint(12, (3, 7))}
    task(batch)["total"].backward()
    both = task.network.tokens.weight.grad.clone()
    ends = []
    for frozen in ("embed", "losses"):
        task.zero_grad()
        table = task.network.tokens
        method = getattr(type(table), frozen)

        def detached(*args, table=table, method=method):
            plain, table.weight.requires_grad = table.weight.requires_grad, False
            try:
                return method(table, *args)
            finally:
                table.weight.requires_grad = plain

        setattr(table, frozen, detached)
        task(batch)["total"].backward()
        ends.append(table.weight.grad)
        delattr(table, frozen)
    torch.testing.assert_close(ends[0] + ends[1], both, rtol=1e-10, atol=1e-14)
    assert all(end.abs().sum() > 0 for end in ends)


def test_the_loss_is_the_mean_cross_entropy(network):
    task = Language(**SIZES, dropout=0.1).double().eval()
    tokens = torch.randint(12, (3, 7))
    logits = task.network(tokens[:, :-1]) @ task.network.tokens.weight.T
    wanted = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(task({"tokens": tokens})["total"], wanted.mean())
    torch.testing.assert_close(task.evaluate({"tokens": tokens})["loss"], wanted.mean(1))


def test_dropout_acts_in_training_only():
    task = Language(**SIZES, dropout=0.5)
    batch = {"tokens": torch.randint(12, (3, 7))}
    assert task(batch)["total"] != task(batch)["total"]
    task.eval()
    assert task(batch)["total"] == task(batch)["total"]


def test_flops_by_hand(network):
    matrices = 2 * 12 * 16 * 16 + 12 * 16
    assert network.forward_flops() == 2 * 6 * matrices + 4 * 16 * 21 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3}, "width that is a multiple"), ({"layers": 0}, "at least 1 layer"), ({"dropout": 1.0}, "a share")],
)
def test_sizes_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        Language(**{**SIZES, **change})
