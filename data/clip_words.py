"""Bounds on the memory and the time of CLIP's tokenizers in Python, open_clip's and transformers'.

They keep each word that they have met, and look at a whole word again for each merge of byte-pair encoding: a word of
10,000 letters, as addresses and encoded files in captions are, takes seconds. Here it takes O(n log n), and the results
are the same.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

END = "</w>"  # of a word
CACHED_WORDS = 1 << 16  # 15 MB; a billion captions have more than a hundred times as many different ones


def bound(tokenizer: Any) -> Any:
    """Bounds the cache and the time of a tokenizer of CLIP in Python, in place, and returns it. Others are left as they
    are."""
    if isinstance(getattr(tokenizer, "cache", None), dict):
        tokenizer.cache = WordCache(tokenizer.cache)
        tokenizer.bpe = WordPieces(tokenizer.bpe_ranks, tokenizer.cache)
    return tokenizer


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


class WordPieces:
    """Takes the place of the method `bpe` of CLIP's tokenizers in Python.

    Args:
        ranks: (left, right) -> rank of the merge of the two; the lowest comes first.
        cache: word -> its pieces, which are added.
    """

    def __init__(self, ranks: dict[tuple[str, str], int], cache: dict[str, str]) -> None:
        self.ranks = ranks
        self.cache = cache

    def __call__(self, word: str) -> str:
        """The pieces of a word of at least one letter, with spaces between them."""
        found = self.cache.get(word)
        if found is None:
            found = self.cache[word] = " ".join(pieces(word, self.ranks))
        return found


def pieces(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """The pieces of a word. Each step merges the pair of the lowest rank at all its places, from left to right.

    The symbols form a linked list over the letters' positions. Possible merges wait in a heap, by rank and position.
    """
    symbols = [*word[:-1], word[-1] + END]
    end = len(symbols)
    following, preceding = list(range(1, end + 1)), list(range(-1, end - 1))
    waiting = [
        (ranks[pair], position, *pair)
        for position, pair in enumerate(zip(symbols, symbols[1:], strict=False))
        if pair in ranks
    ]
    heapify(waiting)
    while waiting:
        rank, changed = waiting[0][0], []
        while waiting and waiting[0][0] == rank:
            _, position, left, right = heappop(waiting)
            after = following[position]
            if symbols[position] != left or after == end or symbols[after] != right:
                continue  # one of the two has been merged with another symbol
            symbols[position], symbols[after] = left + right, ""
            following[position] = following[after]
            if following[position] < end:
                preceding[following[position]] = position
                changed.append(position)
            if preceding[position] >= 0:
                changed.append(preceding[position])
        for position in changed:
            after = following[position]
            pair = symbols[position], symbols[after] if after < end else ""
            if pair in ranks:
                heappush(waiting, (ranks[pair], position, *pair))
    return [symbol for symbol in symbols if symbol]
