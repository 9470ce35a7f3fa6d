"""Bounded caches and merges of CLIP's tokenizers give the same tokens."""

import copy
import pickle
import random
import string
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizers.clip_library import open_clip
from data.tokenizers.clip_words import WordPieces, bound
from tests.fuzzing import few


@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_few_words_are_kept_and_tokens_stay(copied, monkeypatch):
    monkeypatch.setattr("data.tokenizers.clip_words.CACHED_WORDS", 20)
    plain = open_clip.SimpleTokenizer(context_length=12)
    tokenizer = copied(bound(open_clip.SimpleTokenizer(context_length=12)))
    captions = [f"{'ab' * (n % 7 + 1)}{'xyz'[n % 3] * (n % 11 + 1)} a dog" for n in range(90)] + ["<end_of_text> it"]
    assert (tokenizer(captions) == plain(captions)).all()
    assert len(plain.cache) > 60 and len(tokenizer.cache) == 2 and len(tokenizer.bpe._found) <= 20


@few
@given(st.text("ab", min_size=1, max_size=40))
def test_pieces_are_the_librarys(word):
    """Also where merges overlap, or make the same letters in several ways."""
    library = open_clip.SimpleTokenizer.bpe
    pairs = ["a|a", "b|b</w>", "aa|a", "a|b", "ab|ab", "aa|aa", "b|a", "ab|a", "a|b</w>"]
    ranks = {tuple(pair.split("|")): rank for rank, pair in enumerate(pairs)}
    plain = SimpleNamespace(cache={}, bpe_ranks=ranks)
    assert WordPieces(ranks, {})(word) == library(plain, word)


@pytest.fixture(scope="module")
def tokenizers():
    return open_clip.SimpleTokenizer(), bound(open_clip.SimpleTokenizer())


@few
@given(caption=st.text() | st.text("abcdestinoré' 1", max_size=60))
def test_captions_have_the_librarys_tokens(tokenizers, caption):
    plain, bounded = tokenizers
    assert bounded.encode(caption) == plain.encode(caption)


def test_a_long_word_has_its_pieces(tokenizers):
    word = "".join(random.Random(0).choices(string.ascii_lowercase, k=10_000))
    found = tokenizers[1].bpe(word)
    assert found.replace(" ", "") == f"{word}</w>" and len(found.split()) < 0.6 * len(word)


def test_other_tokenizers_are_left_as_they_are():
    assert bound(len) is len
