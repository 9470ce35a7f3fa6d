"""The autoregressive task: its loss against the plain one, weights in and out, and the published sizes."""

import json
import math
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.engines.metrics import figures_of
from recipes.models.autoregressive.masks import TokenLayout
from recipes.models.autoregressive.task import Autoregressive, load_transformer
from recipes.training.microbatches import with_batch_means

ROOT = Path(__file__).resolve().parents[4]
SIZES = {
    "layers": 4, "width": 32, "heads": 2, "text_positions": 6, "text_vocabulary": 20, "side": 4, "codes": 12,
    "kernel": 3,
}  # fmt: skip


def small(seed=0, **changes):
    torch.manual_seed(seed)
    task = Autoregressive(**{**SIZES, **changes})
    torch.nn.init.normal_(task.network.unembedding.weight, std=0.2)  # new ones predict nothing
    return task


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(8)
    text = torch.randint(20, (5, 6), generator=generator)
    for row, length in enumerate([6, 2, 1, 0, 5]):
        text[row, length:] = -1
    text[0, 3] = 0  # a token as any other
    return {"text": text, "image": torch.randint(12, (5, 16), generator=generator)}


def reference(task, batch):
    """Mean cross-entropies of text and image tokens, from all logits at once."""
    network = task.network
    logits = network(batch["text"], batch["image"]) @ network.unembedding.weight.T  # (B, S, V + K)
    log_p = logits.double().log_softmax(-1)
    text = [
        -log_p[b, p - 1, batch["text"][b, p]] for b in range(5) for p in range(1, 6) if batch["text"][b, p] >= 0
    ]  # fmt: skip
    image = [-log_p[b, 6 + i - 1, 20 + batch["image"][b, i]] for b in range(5) for i in range(16)]
    return torch.stack(text).mean(), torch.stack(image).mean()


def test_the_loss_and_its_gradients(batch):
    task = small()
    losses = task(batch)
    text, image = reference(task, batch)
    torch.testing.assert_close(losses["text"].double(), text, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["image"].double(), image, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["total"].double(), text / 8 + 7 * image / 8, rtol=1e-5, atol=0)
    own = torch.autograd.grad(losses["total"], list(task.parameters()))
    plain = torch.autograd.grad(text / 8 + 7 * image / 8, list(task.parameters()))
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_the_text_loss_of_fewer_tokens_than_samples(batch):
    """It is the mean over the two that are predicted."""
    batch["text"][1:] = -1
    batch["text"][0, 3:] = -1
    task = small()
    torch.testing.assert_close(task(batch)["text"].double(), reference(task, batch)[0], rtol=1e-5, atol=0)


def test_a_new_model_gives_every_token_the_same_probability(batch):
    losses = Autoregressive(**SIZES)(batch)
    assert all(value.item() == pytest.approx(math.log(20 + 12), rel=1e-5) for value in losses.values())


def test_every_parameter_is_trained(batch):
    task = small()
    task(batch)["total"].backward()
    untrained = {name for name, p in task.named_parameters() if p.grad is None or not p.grad.any()}
    assert not untrained


def test_a_batch_may_be_divided_anyhow(batch):
    """The loss and its gradients are those of the whole batch, whatever the microbatches, also of ranks that hold
    different numbers of samples. In 64 bits, so that only the order of additions differs."""
    task = small().double()
    whole = task(batch)
    wanted = torch.autograd.grad(whole["total"], list(task.parameters()))
    means = with_batch_means(batch, task, torch.device("cpu"))
    assert means["text_tokens"].tolist() == pytest.approx([10 / 5] * 5)  # 5 + 1 + 0 + 0 + 4 predicted tokens
    for sizes in ([5], [2, 2, 1], [1, 1, 1, 1, 1], [1, 4], [3, 2]):
        found = {name: 0 for name in whole}
        gradients = [0] * len(wanted)
        for size, start in zip(sizes, accumulate([0, *sizes]), strict=False):
            losses = task({name: value[start : start + size] for name, value in means.items()})
            share = size / 5
            found = {name: found[name] + share * loss.detach() for name, loss in losses.items()}
            parts = torch.autograd.grad(share * losses["total"], list(task.parameters()))
            gradients = [one + other for one, other in zip(gradients, parts, strict=True)]
        for name, loss in whole.items():
            torch.testing.assert_close(found[name], loss.detach(), rtol=1e-6, atol=0)  # the mean of tokens is float32
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_a_batch_without_any_text(batch):
    task = small()
    batch["text"][:] = -1
    for given in (batch, with_batch_means(batch, task, torch.device("cpu"))):
        losses = task(given)
        losses["total"].backward()
        assert losses["text"] == 0 and losses["total"].item() == pytest.approx(0.875 * losses["image"].item())
    assert all(p.grad is None or p.grad.isfinite().all() for p in task.parameters())


def test_validation_is_averaged_as_training_is(batch):
    task = small()
    figures = figures_of(task)
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):  # the second has captions without predicted tokens only
        results = task.evaluate({name: value[rows] for name, value in batch.items()})
        for figure in figures.values():
            figure.update(results)
    losses = task(batch)
    for name, key in (("loss", "total"), ("text_loss", "text"), ("image_loss", "image")):
        torch.testing.assert_close(figures[name].compute().float(), losses[key].detach(), rtol=1e-5, atol=0)


def test_validation_figures_are_those_of_each_sample(batch):
    task = small()
    figures = task.evaluate(batch)
    assert set(figures) == {*task.eval_names, "text_tokens"} and figures["text_tokens"].tolist() == [5, 1, 0, 0, 4]
    for row in range(5):
        alone = task({name: value[row : row + 1] for name, value in batch.items()})
        for name, key in (("loss", "total"), ("text_loss", "text"), ("image_loss", "image")):
            torch.testing.assert_close(figures[name][row], alone[key].detach(), rtol=1e-4, atol=1e-6)
    assert figures["text_loss"][2] == figures["text_loss"][3] == 0  # of one token and none there is nothing to predict


def test_it_learns(batch):
    torch.manual_seed(0)
    task = Autoregressive(**SIZES)
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3)
    for _ in range(100):
        loss = task(batch)["total"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3


def test_weights_come_back_strictly(tmp_path, batch):
    task, other = small(), small(seed=1)
    task.export(tmp_path)
    with torch.no_grad():
        for p in task.parameters():
            p.mul_(0.9)
    task.export_average(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["transformer", "transformer_ema"]
    other.load_export(tmp_path)
    averaged = load_transformer(tmp_path / "transformer_ema")
    image, text = batch["image"], batch["text"]
    assert (averaged(text, image) == task.network(text, image)).all()
    assert (other.network(text, image) != task.network(text, image)).any()
    with pytest.raises(ValueError, match="does not fit the model"):
        small(codes=13).load_export(tmp_path)
    assert json.loads((tmp_path / "transformer" / "config.json").read_text()) == SIZES


def test_what_data_must_hold():
    assert small().requirements() == {"text_positions": 6, "text_vocabulary": 20, "codes": 12, "side": 4}


def test_blocks_are_attention_and_mlp_in_turn():
    blocks = small().blocks()
    assert [type(block.branch).__name__ for block in blocks] == ["CausalAttention", "MLP"] * 4


@pytest.mark.parametrize("attention", ["local", "masked"])
def test_the_attention_of_a_recipe_is_that_of_the_network(attention):
    assert small(attention=attention).network.implementation == attention


def test_a_weight_out_of_range():
    with pytest.raises(ValueError, match="image_weight"):
        small(image_weight=1.5)


# Ramesh et al. 2021, table 1 and section 2.2: "effective" counts are those of the matrices of the blocks.
@pytest.mark.parametrize(
    ("name", "width", "effective", "count"),
    [
        ("dalle_12b", 3968, 12.0e9, 12_292_808_448),
        ("dalle_5b", 2688, 5.6e9, 5_684_974_848),
        ("dalle_2b", 1920, 2.8e9, 2_928_234_240),
    ],
)
def test_the_published_sizes(name, width, effective, count):
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [], Recipe, [])
    task = build_on_meta(recipe.model)
    network, rank = task.network, recipe.algorithms["powersgd"].args["rank"]
    assert sum(p.numel() for p in task.parameters()) == count
    matrices = sum(p.numel() for block in task.blocks() for p in block.parameters() if p.ndim == 2)
    assert matrices == 12 * 64 * width**2 == pytest.approx(effective, rel=0.015)
    assert network.layout == TokenLayout(256, 32, 11) and network.head_width == 64 and len(network.kinds) == 64
    assert network.unembedding.out_features == 16384 + 8192
    row = f"| `{name}` | 64 | {width} | {width // 64} | {count:,} | "
    (line,) = [line for line in (ROOT / "docs" / "dalle.md").read_text().splitlines() if line.startswith(row)]
    assert line.endswith(f" | {rank} |")
