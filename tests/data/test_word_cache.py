"""data/word_cache.py: bounded caches give the same tokens."""

import copy
import pickle

import pytest

from data import word_cache
from data.clip_library import open_clip
from data.word_cache import bound


@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_full_cache_is_emptied_and_tokens_stay(copied, monkeypatch):
    monkeypatch.setattr(word_cache, "CACHED_WORDS", 20)
    plain = open_clip.SimpleTokenizer(context_length=12)
    tokenizer = copied(bound(open_clip.SimpleTokenizer(context_length=12)))
    captions = [f"{'ab' * (n % 7 + 1)}{'xyz'[n % 3] * (n % 11 + 1)} a dog" for n in range(90)] + ["<end_of_text> it"]
    for caption in captions * 2:
        assert (tokenizer([caption]) == plain([caption])).all()
        assert len(tokenizer.cache) <= 20
    assert len(plain.cache) > 60


def test_other_tokenizers_are_left_as_they_are():
    assert bound(len) is len
