"""Bounds on the memory and the time of CLIP's tokenizers: open_clip's and transformers' keep each word that they have
met, and take the square of the length of a word."""

from __future__ import annotations

from typing import Any

from data.clip_merges import WordPieces

CACHED_WORDS = 1 << 16  # 15 MB; a billion captions have more than a hundred times as many different ones


class WordCache(dict[str, str]):
    """What a tokenizer made of words. When it is full it is emptied, but for the words that it began with."""

    def __init__(self, first: dict[str, str]) -> None:
        super().__init__(first)
        self._first = dict(first)

    def __setitem__(self, word: str, pieces: str) -> None:
        if len(self) >= CACHED_WORDS:
            self.clear()
            self.update(self._first)
        super().__setitem__(word, pieces)


def bound(tokenizer: Any) -> Any:
    """Bounds the cache and the time of a tokenizer of CLIP in Python, in place, and returns it. Others are left as they
    are."""
    if isinstance(getattr(tokenizer, "cache", None), dict):
        tokenizer.cache = WordCache(tokenizer.cache)
        tokenizer.bpe = WordPieces(tokenizer.bpe_ranks, tokenizer.cache)
    return tokenizer
