"""Captions to numbers: the library's without dropout, and with dropout exactly what the paper's procedure gives."""

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from data.tokenizers import bpe
from data.tokenizers.bpe import Vocabulary
from data.tokenizers.bpe_training import train
from data.tokenizers.vocabulary_files import VocabularyFile, manifest_path

CAPTIONS = [
    f"a {colour} {animal} {place}, {number} times"
    for number, colour in enumerate(["red", "reddish", "blue", "bluish", "grey"])
    for animal in ("cat", "catfish", "caterpillar", "Dog", "dogfish")
    for place in ("on a beach", "in the house", "in the boathouse", "under the café's table", "over the sea: 海の上")
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(CAPTIONS, 340)


@pytest.fixture(scope="module")
def vocabulary(tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


def test_training_depends_on_the_captions_alone(tokenizer):
    shuffled = random.Random(3).sample(CAPTIONS, len(CAPTIONS))
    assert train(iter(shuffled), 340).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == 340
    with pytest.raises(ValueError, match=r"the texts give \d+ entries, 16,384 were asked for; read more of them"):
        train(CAPTIONS, 16384)


def test_captions_are_lower_cased_and_come_back(vocabulary):
    assert vocabulary.encode("A Red CAT") == vocabulary.encode("a red cat")
    for caption in ("a red cat", "zebras? 17 of them; über €", "tab\tand\nline", "🦊🏽", "0!"):
        assert vocabulary.decode(vocabulary.encode(caption)) == caption
    assert vocabulary.encode("") == [] and vocabulary.decode([-1, -1]) == ""
    assert len(vocabulary.encode("a red cat")) == 3  # words, each with its space


pieces = st.sampled_from([" ", "cat", "catfish", "house", "boat", "red", "CAFÉ", "海", "!", "'s", "1", "\n", "  "])
texts = st.lists(pieces | st.text(max_size=6), max_size=12).map("".join)


@settings(max_examples=150)
@given(texts)
def test_without_dropout_the_numbers_are_the_librarys(tokenizer, vocabulary, text):
    expected = tokenizer.encode(text).ids
    assert vocabulary.encode(text) == expected == vocabulary.encode(text, 0.0, random.Random(0))
    assert vocabulary.encode(text) == expected  # words that are remembered by now


@settings(max_examples=100)
@given(texts, st.floats(0, 1), st.integers(0, 2**64 - 1))
@example("a red cat", 5e-324, 0)
def test_dropout_spells_the_same_caption(vocabulary, text, dropout, seed):
    numbers = vocabulary.encode(text, dropout, random.Random(seed))
    assert numbers == vocabulary.encode(text, dropout, random.Random(seed))
    bytes_of = [entry for entry, _ in sorted(vocabulary._tokenizer.get_vocab().items(), key=lambda item: item[1])]
    spelled = "".join(bytes_of[number] for number in numbers)
    assert spelled == "".join(vocabulary._words(text))
    if dropout == 1:
        assert len(numbers) == len(spelled)


def distribution(vocabulary: Vocabulary, symbols: tuple[int, ...], p: float) -> Counter:
    """Every segmentation of a word with its probability, by the definition: at each step each possible merge is left
    out with probability p, and the first of the others by rank and place is made."""
    merges = vocabulary._merges
    possible = sorted(
        (merges[pair][0], place) for place, pair in enumerate(zip(symbols, symbols[1:], strict=False)) if pair in merges
    )
    found: Counter = Counter()
    for number, (_, place) in enumerate(possible):
        merged = merges[symbols[place], symbols[place + 1]][1]
        after = (*symbols[:place], merged, *symbols[place + 2 :])
        for segmentation, probability in distribution(vocabulary, after, p).items():
            found[segmentation] += p**number * (1 - p) * probability
    found[symbols] += p ** len(possible)
    return found


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_draws_from_the_papers_distribution(vocabulary, p):
    """Three words a caption, so that draws run on from word to word."""
    word = "Ġboat"
    exact = distribution(vocabulary, tuple(vocabulary._bytes[byte] for byte in word), p)
    assert math.isclose(sum(exact.values()), 1) and len(exact) > 4
    draws, found, count = random.Random(1), Counter(), 12000
    for _ in range(count // 3):
        numbers = vocabulary.encode("boat boat boat", p, draws)
        words, spelled = [[]], ""
        for number in numbers:
            entry = vocabulary._tokenizer.id_to_token(number)
            if entry.startswith("Ġ") and spelled:
                words.append([])
            spelled += entry
            words[-1].append(number)
        found.update(map(tuple, words))
    assert found.keys() <= exact.keys()
    squares = sum((found[s] - count * q) ** 2 / (count * q) for s, q in exact.items() if count * q >= 5)
    freedom = sum(count * q >= 5 for q in exact.values()) - 1
    assert squares < freedom + 4 * math.sqrt(2 * freedom)  # chi-squared: four deviations above its mean


def test_the_librarys_dropout_is_near(tokenizer, vocabulary):
    """It also draws for merges that have become impossible, so the two differ by a few tokens in a hundred."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.model.dropout = 0.2
    plain = sum(len(vocabulary.encode(caption)) for caption in CAPTIONS)
    theirs = sum(len(own.encode(caption).ids) for caption in CAPTIONS * 8) / 8
    draws = random.Random(5)
    ours = sum(len(vocabulary.encode(caption, 0.2, draws)) for caption in CAPTIONS * 8) / 8
    assert plain < 0.8 * theirs
    assert 0.9 < ours / theirs < 1.1


def test_a_long_word_takes_no_square_of_its_length(vocabulary):
    numbers = vocabulary.encode("cat" * 50_000, 0.1, random.Random(0))  # a second; the square would be an hour
    assert len(numbers) > 50_000


def test_long_words_are_trained_in_parts():
    for run in ("x", " ", "\0"):
        entries = train([f"{run * 3000}y"] * 2, 271).get_vocab()  # whole, they would give an entry of 1,025
        assert max(map(len, entries)) <= 1001, run


def test_memory_is_bounded(tokenizer, vocabulary, monkeypatch):
    expected = [vocabulary.encode(caption) for caption in CAPTIONS]
    monkeypatch.setattr(bpe, "CACHED_WORDS", 4)
    forgetful = Vocabulary(tokenizer)
    assert [forgetful.encode(caption) for caption in CAPTIONS] == expected
    assert 0 < len(forgetful._cached) <= 4


def test_files(tokenizer, vocabulary, tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(FileNotFoundError, match="no vocabulary; make it with precompute/vocabulary.py"):
        Vocabulary.read(path)
    path.write_text(tokenizer.to_str())
    assert Vocabulary.read(path).encode("a red cat") == vocabulary.encode("a red cat")  # a manifest is not needed
    as_it_was = VocabularyFile.read(path)
    assert as_it_was.copy(tmp_path / "plain").read_text() == tokenizer.to_str()
    assert [file.name for file in (tmp_path / "plain").iterdir()] == ["vocabulary.json"]
    manifest_path(path).write_text(json.dumps({"sha256": "0" * 64}))
    with pytest.raises(ValueError, match="mine.json: not the vocabulary that mine.manifest.json describes"):
        Vocabulary.read(path)
    manifest_path(path).write_text("[]")
    with pytest.raises(ValueError, match="mine.manifest.json: damaged"):
        Vocabulary.read(path)
    path.write_text("{}")
    manifest_path(path).unlink()
    with pytest.raises(ValueError, match="mine.json: not a vocabulary of the tokenizers library"):
        Vocabulary.read(path)


def other(kind: str) -> Tokenizer:
    if kind == "words":
        return Tokenizer(WordLevel({"a": 0}))
    found = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    if kind == "few bytes":
        found.pre_tokenizer = ByteLevel()
    return found


@pytest.mark.parametrize("kind", ["words", "no bytes", "few bytes", "special", "gaps", "whole words"])
def test_other_tokenizers_are_refused(kind, tokenizer):
    found = other(kind)
    if kind == "special":
        found = Tokenizer.from_str(tokenizer.to_str())
        found.add_special_tokens(["<end>"])
    if kind in ("gaps", "whole words"):
        state = json.loads(tokenizer.to_str())
        if kind == "gaps":
            state["model"]["vocab"]["a"] = 1000
        state["model"]["ignore_merges"] = kind == "whole words"
        found = Tokenizer.from_str(json.dumps(state))
    with pytest.raises(ValueError, match="not a byte-level BPE without special tokens"):
        Vocabulary(found)
