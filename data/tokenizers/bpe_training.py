"""Trains byte-level BPE vocabularies (Sennrich et al. 2016) with the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

LONGEST = 1000  # characters without white space, or of white space, that are trained as one word
_CUT = re.compile(rf"\S{{{LONGEST}}}(?=\S)|\s{{{LONGEST}}}(?=\s)")
_SPACE = re.compile(r"\s")
_OTHER = re.compile(r"\S")


def train(captions: Iterable[str], entries: int) -> Tokenizer:
    """Trains a byte-level BPE on lower-cased captions. The result does not depend on the captions' order.

    A space is put before the first word, so that a word is spelled in the same way wherever it stands. Longer words
    than `LONGEST` are cut: the library's time grows with the square of a word's length, and a file with a megabyte of
    zeros or of one letter would take hours.

    Args:
        captions: raw captions.
        entries: size of the vocabulary, including the 256 bytes.

    Raises:
        ValueError: the captions hold too few repeated parts for this many entries.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=entries, min_frequency=2, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_without_long_words(captions), trainer)
    found = tokenizer.get_vocab_size()
    if found < entries:
        raise ValueError(
            f"entries: the texts give {found:,} entries, {entries:,} were asked for; read more of them, or ask for "
            f"{found:,} or fewer (and as many text tokens of the transformer)"
        )
    return tokenizer


def _without_long_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, of which those with words longer than `LONGEST` come in parts."""
    for text in texts:
        start = 0
        if _may_have_long_words(text):
            for found in _CUT.finditer(text):
                yield text[start : found.end()]
                start = found.end()
        yield text[start:]


def _may_have_long_words(text: str) -> bool:
    """False if no run of `LONGEST` characters is without white space or is white space only. Far faster than `_CUT`."""
    half = LONGEST // 2  # a run of LONGEST characters contains one of these blocks
    blocks = range(0, len(text) - half + 1, half)
    return any(not (_SPACE.search(text, i, i + half) and _OTHER.search(text, i, i + half)) for i in blocks)
