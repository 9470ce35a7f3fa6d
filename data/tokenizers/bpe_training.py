"""Trains byte-level BPE vocabularies (Sennrich et al. 2016) with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer


def train(captions: Iterable[str], entries: int) -> Tokenizer:
    """Trains a byte-level BPE on lower-cased captions. The result does not depend on the captions' order.

    A space is put before the first word, so that a word is spelled in the same way wherever it stands.

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
    tokenizer.train_from_iterator(captions, trainer)
    found = tokenizer.get_vocab_size()
    if found < entries:
        raise ValueError(
            f"entries: the texts give {found:,} entries, {entries:,} were asked for; read more of them, or ask for "
            f"{found:,} or fewer (and as many text tokens of the transformer)"
        )
    return tokenizer
