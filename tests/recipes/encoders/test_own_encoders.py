"""Encoders of one's own, by the interface of docs/extending.md, and what is said of those that break it."""

import re

import pytest
import torch

from data.system.errors import WrongResult
from precompute.encoding.encodings import encode
from recipes.config.build import build
from recipes.config.values import Component
from recipes.encoders.base import LatentEncoder, TextEncoder
from recipes.models.family import NotInDiffusersError


class Pool(LatentEncoder):
    """What docs/extending.md says that an encoder of one's own defines, as Characters."""

    channels, downsample, scaling_factor, shift_factor = 3, 2, 1.0, 0.0

    def encode(self, images, exact=False):
        mean = torch.nn.functional.avg_pool2d(images / 127.5 - 1, 2)
        return mean, torch.zeros_like(mean)

    def decode(self, latents):
        return torch.nn.functional.interpolate((latents + 1) / 2, scale_factor=2)


class Characters(TextEncoder):
    length, width, layer, tokenizer_id = 4, 2, "last", "characters"

    def tokenize(self, captions):
        return torch.tensor([list(caption.encode()[:4].ljust(4)) for caption in captions])

    def encode_tokens(self, tokens, exact=False):
        return self._network(exact)[0](tokens)


def pool():
    return Pool(lambda: torch.nn.Linear(1, 1), "pool", "fp32")


def characters():
    return Characters(lambda: torch.nn.Embedding(256, 2), "characters", "fp32")


def test_encoders_of_ones_own_encode_and_are_none_of_diffusers():
    images, texts = (
        Pool(lambda: torch.nn.Linear(1, 1), "pool", "fp32"),
        Characters(lambda: torch.nn.Embedding(256, 2), "characters", "fp32"),
    )
    pixels = torch.full((2, 4, 4, 3), 51, dtype=torch.uint8)
    torch.testing.assert_close(images.reconstruct(pixels), torch.full((2, 3, 4, 4), 0.2), atol=1e-3, rtol=0)
    assert texts.encode(["a", "bcdef"]).shape == (2, 4, 2)
    for convert in (images.for_diffusers, texts.for_transformers):
        with pytest.raises(NotInDiffusersError, match="diffusers has no pipeline for the .* encoder "):
            convert()


@pytest.mark.parametrize(
    "found, message",
    [
        (torch.zeros(2, 3, 2, 2), "returns float32 (2, 3, 2, 2) on cpu; return a tuple of the mean and the deviation"),
        ((torch.zeros(2, 3, 2, 2), None), "returns None instead of a tensor (2, 3, 2, 2) of floating-point numbers on"),
        ((torch.zeros(2, 3, 2, 1), torch.zeros(2, 3, 2, 1)), "returns float32 (2, 3, 2, 1) on cpu instead of a tensor"),
        ((torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2)), "returns float32 (1, 3, 2, 2) on cpu instead of a tensor"),
        ((torch.zeros(2, 3, 2, 2), torch.zeros(2, 3, 2, 2).int()), "returns int32 (2, 3, 2, 2) on cpu instead of"),
        (
            (torch.zeros(2, 3, 2, 2), -torch.ones(2, 3, 2, 2)),
            "returns deviations below 0; return the mean and the stand",
        ),
    ],
)
def test_what_an_image_encoder_returns_is_checked(found, message, monkeypatch):
    monkeypatch.setattr(Pool, "encode", lambda self, images, exact: found)
    images = Pool(lambda: torch.nn.Linear(1, 1), "pool", "fp32")
    with pytest.raises(WrongResult, match=re.escape(f"Pool.encode() {message}")):
        images.store(torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8))


@pytest.mark.parametrize("found", [torch.zeros(2, 2), torch.zeros(1, 4, 2), torch.zeros(2, 4, 2).long(), (1, 2), None])
def test_what_a_text_encoder_returns_is_checked(found, monkeypatch):
    monkeypatch.setattr(Characters, "encode_tokens", lambda self, tokens, exact: found)
    texts = Characters(lambda: torch.nn.Embedding(256, 2), "characters", "fp32")
    message = r"^Characters.encode_tokens\(\) returns .* instead of a tensor \(2, 4, 2\) of floating-point numbers on"
    with pytest.raises(WrongResult, match=message):
        texts.encode(["a", "bcdef"])


@pytest.mark.parametrize(
    "kind, name, value, problem",
    [
        (Pool, "channels", None, "is missing; set it to a whole number above 0"),
        (Pool, "downsample", 0, "is 0; set it to a whole number above 0"),
        (Pool, "channels", 3.0, "is 3.0; set it to a whole number above 0"),
        (Pool, "scaling_factor", "1", "is '1'; set it to a number"),
        (Pool, "dtype", torch.half, "is torch.float16; it says what is stored, 'float16': give yours another name"),
        (Pool, "kind", "mine", "is 'mine'; it says what is stored, 'latents': give yours another name"),
        (Characters, "tokenizer_id", None, "is missing; set it to a text"),
        (Characters, "tokenize", None, "is missing; set it to a function"),
    ],
)
def test_an_attribute_that_is_missing_or_wrong_is_one_line(kind, name, value, problem, monkeypatch):
    """It was an AttributeError in the midst of a job, or a TypeError of NumPy."""
    group, builder = ("image_encoder", pool) if kind is Pool else ("text_encoder", characters)
    component = Component(group, "mine", {}, f"{__name__}:{builder.__name__}", group)
    assert isinstance(build(component), kind)
    if value is None:
        monkeypatch.delattr(kind, name)
    else:
        monkeypatch.setattr(kind, name, value)
    line = f"{group}: the attribute `{name}` of {kind.__name__} ({__name__}) {problem}"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        build(component)


@pytest.mark.parametrize("found", [[[1, 2, 3, 4]] * 2, torch.ones(1, 4).long(), torch.ones(2, 5).long()])
def test_what_a_tokenizer_returns_is_checked(found, monkeypatch):
    """A list was an AttributeError in the midst of a job, and one row for all captions an IndexError at the second."""
    monkeypatch.setattr(Characters, "tokenize", lambda self, captions: found)
    component = Component("text_encoder", "mine", {}, f"{__name__}:characters", "text_encoder")
    message = r"^text_encoder: Characters.tokenize\(\) .* returns .* for 2 captions instead of an int64 tensor \(2, 4\)"
    with pytest.raises(ValueError, match=message):
        build(component)


class Reused(Pool):
    """Writes all its results into the same memory, in half precision, by a parameter of its own."""

    def encode(self, images, exact=False):
        self.gain = torch.nn.Parameter(torch.ones(1))
        mean = super().encode(images, exact)[0].half()
        if not hasattr(self, "memory"):
            self.memory = mean, torch.zeros_like(mean)
        return self.memory[0].copy_(mean * self.gain), self.memory[1]


class ReusedText(Characters):
    memory = torch.zeros(2, 4, 2, dtype=torch.float16)

    def encode_tokens(self, tokens, exact=False):
        return self.memory.copy_(super().encode_tokens(tokens, exact))


def test_results_stay_when_the_memory_that_an_encoder_returned_is_used_again():
    """The job encodes a batch while the one before is written: its latents were those of the next one."""
    images = Reused(lambda: torch.nn.Linear(1, 1), "reused", "fp32")
    texts = ReusedText(lambda: torch.nn.Embedding(256, 2), "reused", "fp32")
    first, second = (
        encode({4: torch.full((2, 1, 4, 4, 3), gray, dtype=torch.uint8)}, texts.tokenize([name] * 2), images, texts)
        for gray, name in ((0, "a"), (255, "b"))
    )
    assert (first.images[4].arrays["mean"] == -1).all() and (second.images[4].arrays["mean"] == 1).all()
    assert not torch.equal(first.text, second.text) and not first.images[4].arrays["mean"].requires_grad


def test_embeddings_in_half_precision_are_given_to_the_model_in_fp32():
    """Sets hold them in half precision anyway, so that only drawing ended, with a RuntimeError of the first layer."""
    texts = ReusedText(lambda: torch.nn.Embedding(256, 2), "reused", "fp32")
    assert texts.encode(["a", "bcdef"]).dtype == torch.float32


class Words:
    """A tokenizer of one's own that has the names of libraries."""

    def __init__(self, inner):
        self.tokenizer = inner

    def __call__(self, captions):
        return torch.zeros(len(captions), 4, dtype=torch.int64)

    def encode(self, caption):
        return caption.split()


@pytest.mark.parametrize("inner", [None, Words(None)])
def test_tokens_of_a_tokenizer_of_ones_own_are_not_counted(inner):
    """generate.py counts those that are cut. It ended with a TypeError before the first image, or counted marks."""
    texts = characters()
    texts.tokenize = Words(inner)
    assert texts.lost_tokens(["a b c d"]) == [0]
