"""CLIP's byte-pair encoding of one word in O(n log n), where open_clip and transformers need O(n^2).

They look at a whole word again for each merge, so that a word of 10,000 letters, as addresses and encoded files in
captions are, takes seconds. The results are the same.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

END = "</w>"  # of a word


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
