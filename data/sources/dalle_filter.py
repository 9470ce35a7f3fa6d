"""The filter of DALL-E's training data, one definition for its vocabulary, its dVAE and its transformer."""

from __future__ import annotations

from data.sources.filters import Filter

MONTH = (
    "(jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?|"
    "dec(ember)?)[.]?"
)
DAY = r"\d{1,2}(st|nd|rd|th)?"
# 2010-05-03, 3.5.10, 3/5, Monday, 3rd of May '10, March 3; with a year or without.
DATE = (
    r"(the )?([a-z]+day,? )?"
    rf"(\d{{4}}-\d\d-\d\d|\d{{1,2}}[./-]\d{{1,2}}([./-](\d{{2,4}})?)?|{DAY} (of )?{MONTH}\b|{MONTH} {DAY}\b)"
    r"(,? '?(\d{4}|\d{2})\b)?"
)
TAKEN = "(photographed|taken|pictured|seen|posted|published|updated)"
# Text that says nothing about the image. The paper gives "photographed on <date>" as its example; the rest is this
# recipe's own choice.
BOILERPLATE = [
    rf"{TAKEN} on {DATE}",
    rf"{TAKEN} (on|at|in) .{{0,40}}?\b(18|19|20)\d{{2}}\b",  # with a place or another form of date before the year
    r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}",
    r"\d{1,2}(st|nd|rd|th)? "
    r"(january|february|march|april|may|june|july|august|september|october|november|december),? \d{4}",
    r"(\(c\)|©).*",
    r"(image|photo|picture|file|img|dsc)[ _-]?\d+",
]
MIN_LETTERS = {"en": 0.9}  # language -> least share of letters from a to z


def dalle(*, min_side: int = 256, max_pixels: int = 50_000_000, language: str | None = "en") -> Filter:
    """The filter of DALL-E's data: length, language and boilerplate of captions, aspect ratio of images.

    It is that of Ramesh et al. 2021, appendix C. Captions need 5 characters and 2 words, and boilerplate must match at
    most half of them; the paper gives no numbers. Images have an aspect ratio from 1/2 to 2. The paper identifies
    languages by cld3, of which PyPI has no wheel for Python 3.11; py3langid takes its place.

    py3langid is often unsure which of several languages a short caption in another alphabet has. English captions must
    therefore have 90% of letters from a to z as well.

    Args:
        min_side: minimum length of an image's shorter side, in pixels. A vocabulary job ignores it.
        max_pixels: maximum number of pixels (width x height) of an image.
        language: the captions' language, as py3langid names it; null for any.

    Raises:
        ValueError: see `Filter`.
    """
    return Filter(
        min_side=min_side,
        max_pixels=max_pixels,
        min_aspect=0.5,
        max_aspect=2.0,
        min_caption_chars=5,
        min_caption_words=2,
        min_ascii_letters=MIN_LETTERS.get(language, 0.0),
        language=language,
        boilerplate=BOILERPLATE,
    )


dalle.version = 1  # of the rules above and those of `Filter`, see there
