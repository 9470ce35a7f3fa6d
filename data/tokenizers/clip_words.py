"""Bounds on the memory and the time of CLIP's tokenizers in Python, open_clip's and transformers'.

They keep each word that they have met, and look at a whole word again for each merge of byte-pair encoding: a word of
10,000 letters, as addresses and encoded files in captions are, takes seconds. The `tokenizers` library takes
O(n log n), and gives the same pieces where no merge comes before those that make its parts, as training finds them.
"""

from __future__ import annotations

import functools
from typing import Any

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

CACHED_WORDS = 1 << 16  # 15 MB; a billion captions have more than a hundred times as many different ones
END = "</w>"  # of a word


def bound(tokenizer: Any) -> Any:
    """Bounds the cache and the time of a tokenizer of CLIP in Python, in place, and returns it. Others are left as they
    are."""
    if isinstance(getattr(tokenizer, "cache", None), dict):
        tokenizer.bpe = WordPieces(tokenizer.bpe_ranks, tokenizer.cache)
    return tokenizer


class WordPieces:
    """Takes the place of the method `bpe` of CLIP's tokenizers in Python.

    Args:
        ranks: (left, right) -> rank of the merge of the two; the lowest comes first.
        special: special tokens, and what they become.
    """

    def __init__(self, ranks: dict[tuple[str, str], int], special: dict[str, str]) -> None:
        self._model = _model(tuple(pair for pair in sorted(ranks, key=ranks.get) if len(pair) == 2))
        self._special = dict(special)
        self._found: dict[str, str] = {}

    def __call__(self, word: str) -> str:
        """The pieces of a word of at least one letter of the byte alphabet, with spaces between them."""
        found = self._special.get(word) or self._found.get(word)
        if found is None:
            if len(self._found) >= CACHED_WORDS:
                self._found.clear()
            found = self._found[word] = " ".join(piece.value for piece in self._model.tokenize(word))
        return found


@functools.lru_cache(maxsize=2)
def _model(merges: tuple[tuple[str, str], ...]) -> BPE:
    """Pairs of symbols, the first to be merged first, as a model. A run has several tokenizers of the same merges."""
    letters = ByteLevel.alphabet()
    symbols = [*letters, *(letter + END for letter in letters)]
    symbols += [symbol for left, right in merges for symbol in (left, right, left + right)]
    numbers = {symbol: number for number, symbol in enumerate(dict.fromkeys(symbols))}
    return BPE(numbers, list(merges), end_of_word_suffix=END)
