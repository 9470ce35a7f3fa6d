import pytest
import torch
from torch import nn

from recipes.checking import attention_kernels
from recipes.checking.attention_kernels import attention, attentions
from recipes.models.autoregressive.masks import TokenLayout
from recipes.models.autoregressive.transformer import TokenTransformer


def fails(*tensors):
    raise RuntimeError("no kernel image is available\nfor this device")


def wrong_backward(query, key, value):
    """The right result, whose gradients are those of a longer sum."""
    y = attention_kernels.naive(*(tensor.transpose(1, 2) for tensor in (query, key, value))).transpose(1, 2)
    return y + (query - query.detach())


@pytest.mark.parametrize(
    ("kernel", "level", "text"),
    [
        (None, "ok", "right on this cpu forward and backward"),
        (fails, "error", "does not run on this cpu (RuntimeError: no kernel image is available); use another"),
        (lambda query, key, value: value, "error", "is wrong by"),
        (wrong_backward, "error", "is wrong by"),
    ],
)
def test_the_kernel_runs_and_is_compared(monkeypatch, kernel, level, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if kernel is not None:
        monkeypatch.setitem(attention_kernels.KERNELS, "sdpa", kernel)
    found = attention()
    assert found.level == level and text in found.text and found.text.startswith("sdpa (it needs a GPU)")


def test_xformers_that_is_asked_for_and_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = attention("xformers")
    assert found.level == "error" and found.text == "xformers cannot run here (it needs a GPU); use sdpa or auto"


def test_a_recipe_names_its_own(small_recipe, tmp_path):
    recipe = small_recipe(tmp_path / "run", "algorithms.attention.implementation=eager")
    assert [finding.text for finding in attentions(recipe, nn.Identity())] == ["eager: matrix products and a softmax"]


def transformer(side, implementation):
    with torch.device("meta"):
        return TokenTransformer(
            layout=TokenLayout(4, side, 3), layers=4, width=8, heads=2, text_vocabulary=5, codes=5,
            implementation=implementation,
        )  # fmt: skip


@pytest.mark.parametrize(("implementation", "level"), [("masked", "ok"), ("local", "ok"), ("flex", "error")])
def test_a_transformer_over_tokens(quick_recipe, tmp_path, monkeypatch, implementation, level):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = quick_recipe(tmp_path / "run", "algorithms.attention=null")
    found = list(attentions(recipe, transformer(4, implementation)))
    assert [finding.level for finding in found] == [level] * (1 if level == "error" else 3)
