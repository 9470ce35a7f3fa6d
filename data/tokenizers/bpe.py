"""Encodes captions with a byte-level BPE vocabulary, with dropped merges in training (BPE dropout).

The encoding is that of Sennrich et al. 2016 and the dropout that of Provilkov et al. 2020: at each step every possible
merge is left out with probability p, and the best of the others is applied. A word is done when no merge is left. The
`tokenizers` library reads the vocabulary and splits captions into words. Its own dropout draws from a generator that
cannot be seeded, so a resumed run would see other tokens; therefore the merges are applied here. Without dropout the
token ids are those of the library.

The best possible merge is asked first whether it is dropped, so few draws are made. A word whose merges are all kept is
encoded as without dropout, and that result is cached.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from data.tokenizers.bpe_dropout import MergeDropout
from data.tokenizers.vocabulary_files import manifest_path, read_manifest

CACHED_WORDS = 1 << 16  # the cache is emptied when it is full


class Vocabulary:
    """A trained vocabulary.

    Attributes:
        size: number of entries. Token ids are 0 to size - 1.
        where: the vocabulary's name in error messages.

    Args:
        tokenizer: a byte-level BPE without special tokens, as `precompute/vocabulary.py` trains it.
        where: the vocabulary's name in error messages.

    Raises:
        ValueError: the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: Tokenizer, where: str = "vocabulary") -> None:
        self.where = where
        state = json.loads(tokenizer.to_str())
        model, splitting = state["model"], state["pre_tokenizer"] or {}
        if model["type"] != "BPE":
            raise _not_byte_level(where)
        others = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        extras = state["added_tokens"] or any(model.get(key) for key in others)
        of_bytes = splitting.get("type") == "ByteLevel" and set(ByteLevel.alphabet()) <= set(model["vocab"])
        numbered = of_bytes and sorted(model["vocab"].values()) == list(range(len(model["vocab"])))
        if not numbered or extras:
            raise _not_byte_level(where)
        entries: dict[str, int] = model["vocab"]
        self.size = len(entries)
        self._tokenizer = tokenizer
        self._bytes = {entry: number for entry, number in entries.items() if len(entry) == 1}
        # (left, right) -> (rank, entry): the lower the rank, the earlier the merge.
        self._merges = {
            (entries[left], entries[right]): (rank, entries[left + right])
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._cached: dict[str, tuple[list[int], int]] = {}  # word -> token ids without dropout, and number of merges

    @classmethod
    def read(cls, path: str | Path) -> Vocabulary:
        """Reads a vocabulary from its file, and compares it with the manifest beside it if there is one.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no vocabulary, or not the one that the manifest describes.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no vocabulary; make it with precompute/vocabulary.py")
        data = path.read_bytes()
        if manifest_path(path).is_file() and read_manifest(path)["sha256"] != hashlib.sha256(data).hexdigest():
            raise ValueError(
                f"{path}: not the vocabulary that {manifest_path(path).name} describes; restore it, or train it again"
            )
        try:
            tokenizer = Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises plain exceptions
            raise ValueError(f"{path}: not a vocabulary of the tokenizers library ({error})") from None
        return cls(tokenizer, str(path))

    def encode(self, caption: str, dropout: float = 0.0, draws: random.Random | None = None) -> list[int]:
        """The token ids of a caption.

        Args:
            caption: raw caption; the vocabulary's normalisation (lower case) is applied.
            dropout: probability that a merge is left out.
            draws: random generator for the dropout; needed if `dropout` is above 0.
        """
        drops = MergeDropout(dropout, draws)
        ids: list[int] = []
        for word in self._words(caption):
            cached = self._cached.get(word)
            if cached is None:
                if len(self._cached) >= CACHED_WORDS:
                    self._cached.clear()
                cached = self._cached[word] = self._merge(word, MergeDropout(0.0, None))
            plain, merges = cached
            if drops.passes(merges):
                ids += plain
            else:
                ids += self._merge(word, drops)[0]
        return ids

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """The token ids of texts without dropout, by the library, on all cores."""
        # The fast method does not note where in the text each token lies, which nobody asks here.
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """The normalised caption of token ids; -1 (no token) is skipped."""
        return self._tokenizer.decode([number for number in ids if number >= 0]).strip()

    def _words(self, caption: str) -> list[str]:
        """The words of a caption, spelled in the byte alphabet."""
        normalizer = self._tokenizer.normalizer
        text = caption if normalizer is None else normalizer.normalize_str(caption)
        return [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    def _merge(self, word: str, drops: MergeDropout) -> tuple[list[int], int]:
        """The token ids of a word, and the number of merges that were applied.

        The symbols form a linked list over the word's positions. Possible merges wait in a heap, ordered by rank, then
        position. Those that were dropped in one step are possible again in the next.
        """
        symbols = [self._bytes[byte] for byte in word]
        end = len(symbols)
        following, preceding = list(range(1, end + 1)), list(range(-1, end - 1))
        possible: list[tuple[int, int, int, int]] = []  # (rank, position, left, right)

        def offer(position: int) -> None:
            pair = symbols[position], symbols[following[position]]
            found = self._merges.get(pair)
            if found is not None:
                heapq.heappush(possible, (found[0], position, *pair))

        for position in range(end - 1):
            offer(position)
        made, dropped = 0, []
        while possible:
            candidate = heapq.heappop(possible)
            _, position, left, right = candidate
            after = following[position]
            if symbols[position] != left or after == end or symbols[after] != right:
                continue  # one of the two has been merged into another symbol
            if drops.next():
                dropped.append(candidate)
                continue
            for again in dropped:
                heapq.heappush(possible, again)
            dropped.clear()
            symbols[position], symbols[after] = self._merges[left, right][1], -1
            following[position] = following[after]
            if following[position] < end:
                preceding[following[position]] = position
                offer(position)
            if preceding[position] >= 0:
                offer(preceding[position])
            made += 1
        return [symbol for symbol in symbols if symbol >= 0], made


def _not_byte_level(where: str) -> ValueError:
    return ValueError(
        f"{where}: not a byte-level BPE without special tokens, which captions are encoded with; make one with "
        "precompute/vocabulary.py"
    )
