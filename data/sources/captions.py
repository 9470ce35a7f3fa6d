"""Which captions are worth training on: long enough, in one language, and not mostly boilerplate."""

from __future__ import annotations

import functools
import unicodedata
from typing import Any


def without_surrogates(text: str) -> str:
    """A text with a question mark for each lone surrogate: JSON can hold them, and they cannot be stored as UTF-8."""
    return text.encode("utf-8", "replace").decode()


class CaptionRules:
    """Judges captions. See `data.sources.filters.Filter` for the arguments.

    Raises:
        ValueError: a bound that nothing can meet, a pattern that does not compile, or an unknown language.
    """

    def __init__(
        self,
        min_chars: int,
        max_chars: int | None,
        min_words: int,
        min_ascii_letters: float,
        language: str | None,
        language_confidence: float,
        boilerplate: list[str],
        max_boilerplate: float,
    ) -> None:
        if min_chars < 1:
            raise ValueError(f"filter.min_caption_chars is {min_chars}: give 1 or more")
        if max_chars is not None and max_chars < min_chars:
            raise ValueError(f"filter.max_caption_chars {max_chars} is below min_caption_chars")
        if min_words < 1:
            raise ValueError(f"filter.min_caption_words is {min_words}: give 1 or more")
        shares = {
            "min_ascii_letters": min_ascii_letters,
            "language_confidence": language_confidence,
            "max_boilerplate": max_boilerplate,
        }
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ValueError(f"filter.{name} is {share}: give a share from 0 to 1")
        for number, pattern in enumerate(boilerplate):
            _check_pattern(number, pattern)
        if language is not None:
            _check_language(language)
        self.min_chars = min_chars
        self.max_chars = max_chars
        self.min_words = min_words
        self.min_ascii_letters = min_ascii_letters
        self.language = language
        self.language_confidence = language_confidence
        self.boilerplate = "|".join(f"(?:{pattern})" for pattern in boilerplate)
        self.max_boilerplate = max_boilerplate

    def problem(self, caption: str) -> tuple[str, str] | None:
        """Why a caption is rejected: a reason from `base.REASONS` and a detail. It has no surrounding white space and
        no lone surrogates.

        Cheap checks come first. Returns None if the caption is accepted.
        """
        if all(one.isspace() or unicodedata.category(one) in ("Cc", "Cf") for one in caption):  # NUL, zero-width marks
            return "empty_caption", ""
        if len(caption) < self.min_chars:
            return "short_caption", f"{len(caption)} characters"
        if self.max_chars is not None and len(caption) > self.max_chars:
            return "long_caption", f"{len(caption)} characters"
        words = len(caption.split()) if self.min_words > 1 else 1
        if words < self.min_words:
            return "short_caption", f"{words} words"
        if self.min_ascii_letters and (share := ascii_letters(caption)) < self.min_ascii_letters:
            return "other_letters", f"{share:.2f} of the letters are ASCII"
        if self.boilerplate:
            share = 1 - len(_without(self.boilerplate, caption)) / len(caption)
            if share > self.max_boilerplate:
                return "boilerplate", f"{share:.2f} of the characters"
        if self.language is not None:
            found, probability = _identifier().classify(caption)
            if found != self.language and probability >= self.language_confidence:
                return "other_language", f"{found} with probability {probability:.2f}"
        return None


def ascii_letters(caption: str) -> float:
    """Share of a caption's letters that are a to z; 1 if it has no letters."""
    letters = [character for character in caption if character.isalpha()]
    return sum(letter.isascii() for letter in letters) / len(letters) if letters else 1.0


def _without(pattern: str, caption: str) -> str:
    """A caption without all matches of a pattern, by RE2, which takes linear time for every pattern."""
    import pyarrow
    import pyarrow.compute

    # (?is): ignore case, and let . match line ends.
    texts = pyarrow.array([caption])
    return pyarrow.compute.replace_substring_regex(texts, pattern=f"(?is){pattern}", replacement="")[0].as_py()


def _check_pattern(number: int, pattern: str) -> None:
    try:
        _without(f"(?:{pattern})", "")
    except ValueError as error:
        raise ValueError(
            f"filter.boilerplate.{number}: {pattern!r} is no regular expression of RE2 (which has no look-around and "
            f"no back-references): {' '.join(str(error).split())}"
        ) from None


def _check_language(language: str) -> None:
    known = _identifier().labels
    if language not in known:
        raise ValueError(f"filter.language is {language!r}: give one of {', '.join(sorted(known))}")


@functools.cache  # 70 MB per process; not part of the filter, because that is sent to worker processes
def _identifier() -> Any:
    """py3langid's, which knows 139 languages; its model is in the package, and no pickle."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
