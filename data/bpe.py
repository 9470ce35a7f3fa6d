"""Captions to numbers by a byte-level BPE vocabulary, with merges dropped in training (BPE dropout).

Sennrich et al. 2016 for the encoding, Provilkov et al. 2020 for the dropout: at each step each possible merge is left
out with probability p, and the best of the others is made; a word is done when none is left. The `tokenizers` library
reads the vocabulary and splits captions into words; its own dropout draws from a generator that cannot be seeded, so
that a resumed run would see other tokens, and the merging is therefore done here. Without dropout the numbers are the
library's.

Draws are few: the merge that would be made is asked first, so most draws say "keep", and the distance to the next
"drop" is geometric. A word whose merges all lie before it is encoded as without dropout, which is remembered.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

REMEMBERED = 1 << 16  # words; the memory is emptied when it is full
FAR = 1 << 62  # draws; further than any caption goes
PROMISE = ".manifest.json"  # beside a vocabulary: what it was made of, and the sha256 of its file


class Vocabulary:
    """A trained vocabulary.

    Attributes:
        size: entries, numbered from 0.
        where: for messages.

    Args:
        tokenizer: as `precompute/vocabulary.py` trains it: a BPE over bytes, without special tokens.
        where: for messages.

    Raises:
        ValueError: a tokenizer of another kind.
    """

    def __init__(self, tokenizer: Tokenizer, where: str = "vocabulary") -> None:
        self.where = where
        state = json.loads(tokenizer.to_str())
        model, splitting = state["model"], state["pre_tokenizer"] or {}
        others = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        extras = state["added_tokens"] or any(model.get(key) for key in others)
        of_bytes = splitting.get("type") == "ByteLevel" and set(ByteLevel.alphabet()) <= set(model["vocab"])
        numbered = of_bytes and sorted(model["vocab"].values()) == list(range(len(model["vocab"])))
        if model["type"] != "BPE" or not numbered or extras:
            raise ValueError(
                f"{where}: not a byte-level BPE without special tokens, which captions are encoded with; make one with "
                "precompute/vocabulary.py"
            )
        entries: dict[str, int] = model["vocab"]
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        self.size = len(entries)
        self._tokenizer = tokenizer
        self._bytes = {entry: number for entry, number in entries.items() if len(entry) == 1}
        # (left, right) -> (rank, entry): the lower the rank, the earlier the merge.
        self._merges = {
            (entries[left], entries[right]): (rank, entries[left + right]) for rank, (left, right) in enumerate(pairs)
        }
        self._known: dict[str, tuple[list[int], int]] = {}  # word -> numbers without dropout, and merges made
        self._decoder = tokenizer.decode

    @classmethod
    def read(cls, path: str | Path) -> Vocabulary:
        """A vocabulary from its file, held against its manifest where that lies beside it.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: no vocabulary, or another one than its manifest promises.
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
        """A caption's numbers.

        Args:
            caption: raw; the vocabulary's own normalisation (lower case) is applied.
            dropout: probability that a merge is left out.
            draws: where dropout draws from; needed where there is any.
        """
        drops = _Drops(dropout, draws)
        numbers: list[int] = []
        for word in self._words(caption):
            known = self._known.get(word)
            if known is None:
                known = self._remember(word)
            plain, merges = known
            if drops.passes(merges):
                numbers += plain
            else:
                numbers += self._merge(word, drops)[0]
        return numbers

    def decode(self, numbers: list[int]) -> str:
        """The normalised caption of numbers; -1 (no token) is skipped."""
        return self._decoder([number for number in numbers if number >= 0]).strip()

    def _words(self, caption: str) -> list[str]:
        """A caption in words of the byte alphabet."""
        normalizer = self._tokenizer.normalizer
        text = caption if normalizer is None else normalizer.normalize_str(caption)
        return [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    def _remember(self, word: str) -> tuple[list[int], int]:
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        found = self._known[word] = self._merge(word, _Drops(0.0, None))
        return found

    def _merge(self, word: str, drops: _Drops) -> tuple[list[int], int]:
        """A word's numbers, and how many merges made them.

        Symbols are a linked list over the word's places; possible merges wait in a heap by rank, then place. Those
        that were dropped at a step are possible again at the next.
        """
        symbols = [self._bytes[byte] for byte in word]
        end = len(symbols)
        following, preceding = list(range(1, end + 1)), list(range(-1, end - 1))
        possible: list[tuple[int, int, int, int]] = []  # (rank, place, left, right)

        def offer(place: int) -> None:
            pair = symbols[place], symbols[following[place]]
            found = self._merges.get(pair)
            if found is not None:
                heapq.heappush(possible, (found[0], place, *pair))

        for place in range(end - 1):
            offer(place)
        made, dropped = 0, []
        while possible:
            candidate = heapq.heappop(possible)
            _, place, left, right = candidate
            after = following[place]
            if symbols[place] != left or after == end or symbols[after] != right:
                continue  # one of the two has become part of another symbol
            if drops.next():
                dropped.append(candidate)
                continue
            for again in dropped:
                heapq.heappush(possible, again)
            dropped.clear()
            symbols[place], symbols[after] = self._merges[left, right][1], -1
            following[place] = following[after]
            if following[place] < end:
                preceding[following[place]] = place
                offer(place)
            if preceding[place] >= 0:
                offer(preceding[place])
            made += 1
        return [symbol for symbol in symbols if symbol >= 0], made


class _Drops:
    """Independent draws with probability p, as the number of draws before the next one that says "drop"."""

    def __init__(self, p: float, draws: random.Random | None) -> None:
        assert p == 0 or draws is not None, "dropout needs a generator"
        self._log_keep = math.log1p(-p) if p < 1 else -math.inf
        self._draws = draws
        self._kept = math.inf if p == 0 else self._distance()

    def _distance(self) -> int:
        # P(distance >= k) = (1 - p)^k; with p below 1e-300 it is no number any more.
        return int(min(math.log(1.0 - self._draws.random()) / self._log_keep, FAR))

    def passes(self, count: int) -> bool:
        """Whether the next `count` draws all say "keep"; they are then made, else none is."""
        if count > self._kept:
            return False
        self._kept -= count
        return True

    def next(self) -> bool:
        """Whether the next draw says "drop"."""
        if self._kept > 0:
            self._kept -= 1
            return False
        self._kept = self._distance()
        return True


def check_text(requirements: dict[str, Any], positions: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Holds the text side of token data against what a model needs.

    Args:
        requirements: of the model; text_positions and text_vocabulary are looked at.
        positions: text tokens of a sample.
        vocabulary: of the data; None: not there yet, as in a dry run.

    Returns:
        the requirements that are left, which the set's manifest must fit.

    Raises:
        ValueError: they differ.
    """
    wanted = requirements.get("text_positions", positions)
    if wanted != positions:
        raise ValueError(
            f"tokens: text_positions is {positions}, the recipe expects {wanted}; give data.positions the model's "
            "number of text positions"
        )
    if vocabulary is not None and (wanted := requirements.get("text_vocabulary", vocabulary.size)) != vocabulary.size:
        raise ValueError(
            f"{vocabulary.where}: text_vocabulary is {vocabulary.size}, the recipe expects {wanted}; give the model as "
            "many text tokens as the vocabulary has entries, or train another with precompute/vocabulary.py"
        )
    return {name: value for name, value in requirements.items() if name not in ("text_positions", "text_vocabulary")}


def manifest_path(vocabulary: Path) -> Path:
    """Where a vocabulary's manifest lies."""
    return vocabulary.with_name(vocabulary.stem + PROMISE)


def read_manifest(vocabulary: Path) -> dict[str, Any]:
    """What a vocabulary's manifest says.

    Raises:
        ValueError: it is damaged.
    """
    path = manifest_path(vocabulary)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict) or "sha256" not in values:
        raise ValueError(f"{path}: damaged; delete it and train the vocabulary again")
    return values


def copy_vocabulary(vocabulary: Path, folder: Path) -> Path:
    """Copies a vocabulary, and its manifest where it has one, to FOLDER/vocabulary.json; gives that file."""
    copy = folder / "vocabulary.json"
    shutil.copyfile(vocabulary, copy)
    if manifest_path(vocabulary).is_file():
        shutil.copyfile(manifest_path(vocabulary), manifest_path(copy))
    return copy


def train(captions: Iterable[str], entries: int) -> Tokenizer:
    """A byte-level BPE over lower-cased captions; the same captions, in whatever order, give the same one.

    A space is put before the first word, so that a word has one spelling wherever it stands.

    Args:
        captions: raw.
        entries: size of the vocabulary, the 256 bytes included.

    Raises:
        ValueError: captions with fewer repeated parts than there are to be entries.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=entries, min_frequency=2, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    found = tokenizer.get_vocab_size()
    if found < entries:
        raise ValueError(
            f"entries: the captions give {found:,} entries, {entries:,} were asked for; read more captions, or ask for "
            f"{found:,} or fewer (and as many text tokens of the transformer)"
        )
    return tokenizer
