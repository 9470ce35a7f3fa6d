"""Bounded caches and merges of CLIP's tokenizers give the same tokens."""

import copy
import pickle
import random
import string
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import clip_words
from data.clip_library import open_clip
from data.clip_words import WordPieces, bound
from tests.fuzzing import few


@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_full_cache_is_emptied_and_tokens_stay(copied, monkeypatch):
    monkeypatch.setattr(clip_words, "CACHED_WORDS", 20)
    plain = open_clip.SimpleTokenizer(context_length=12)
    tokenizer = copied(bound(open_clip.SimpleTokenizer(context_length=12)))
    captions = [f"{'ab' * (n % 7 + 1)}{'xyz'[n % 3] * (n % 11 + 1)} a dog" for n in range(90)] + ["<end_of_text> it"]
    for caption in captions * 2:
        assert (tokenizer([caption]) == plain([caption])).all()
        assert len(tokenizer.cache) <= 20
    assert len(plain.cache) > 60


RANKS = st.permutations(["a|b</w>", "b|a", "a|a", "ab|a", "a|ba", "ab|ab", "aa|a", "aa|aa", "b|b</w>", "a|b"])


@few
@given(st.text("ab", min_size=1, max_size=40), RANKS)
def test_pieces_are_the_librarys(word, ranks):
    """Also where merges come in an order in which no training finds them."""
    library = open_clip.SimpleTokenizer.bpe
    ranks = {tuple(pair.split("|")): rank for rank, pair in enumerate(ranks)}
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


def test_the_time_of_a_long_word_is_not_its_square(tokenizers):
    """The library looks ranks up millions of times, and takes 5 s."""

    class Counted(dict):
        asked = 0

        def __contains__(self, pair):
            Counted.asked += 1
            return super().__contains__(pair)

        def get(self, pair, default=None):
            Counted.asked += 1
            return super().get(pair, default)

    word = "".join(random.Random(0).choices(string.ascii_lowercase, k=10_000))
    found = WordPieces(Counted(tokenizers[0].bpe_ranks), {})(word)
    assert Counted.asked < 5 * len(word)
    assert found.replace(" ", "") == f"{word}</w>" and len(found.split()) < 0.6 * len(word)


def test_other_tokenizers_are_left_as_they_are():
    assert bound(len) is len
