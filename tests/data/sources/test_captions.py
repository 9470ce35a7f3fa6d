"""Rules for captions: what is set aside, with which reason, and that bad rules are named when the filter is made."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sources import captions
from data.sources.base import REASONS, Rejected, Sample
from data.sources.captions import ascii_letters
from data.sources.dalle_filter import dalle
from data.sources.filters import Filter
from precompute.config import EncodeConfig, VocabularyConfig
from recipes.config.build import build
from recipes.config.recipe import Recipe, load_config

ROOT = Path(__file__).resolve().parents[3]


def judge(caption: str, **rules):
    """The caption, or the reason and detail that it is set aside with; the picture is not looked at."""
    return outcome(Filter(**rules), caption)


def outcome(filter: Filter, caption: str):
    """As `judge`, for a filter that there is."""
    found = filter.caption(Sample("k", b"no picture", caption))
    return (found.reason, found.detail) if isinstance(found, Rejected) else found


def test_words():
    assert judge(" two words\n", min_caption_words=2) == "two words"
    assert judge("one-word", min_caption_words=2) == ("short_caption", "1 words")
    assert judge("a b", min_caption_words=2, min_caption_chars=4) == ("short_caption", "3 characters")


def test_letters():
    assert judge("красный дом", min_ascii_letters=0.5) == ("other_letters", "0.00 of the letters are ASCII")
    assert judge("a café", min_ascii_letters=0.8) == "a café"
    assert judge("1, 2, 3!", min_ascii_letters=1.0) == "1, 2, 3!"
    assert judge("красный дом") == "красный дом"


@given(st.text())
def test_share_of_ascii_letters(text):
    letters = [character for character in text if character.isalpha()]
    few = [letter for letter in letters if "a" <= letter.lower() <= "z" and letter.isascii()]
    assert ascii_letters(text) == (len(few) / len(letters) if letters else 1.0)


def test_what_cannot_be_stored_or_seen():
    assert judge("cut emoji \ud83d here") == judge("cut emoji \ud83d here", boilerplate=DATES) == "cut emoji ? here"
    assert judge("\u200b \ufeff\u00ad") == ("empty_caption", "")
    assert judge("\0\x07\x7f\x9d") == ("empty_caption", "")
    assert judge("a\0b") == "a\0b"
    assert judge("\u200bdog") == "\u200bdog"


DATES = [r"photographed on .*", r"\(c\) \w+ \d{4}"]


def test_boilerplate():
    assert judge("Photographed on 12 May 2012", boilerplate=DATES) == ("boilerplate", "1.00 of the characters")
    assert judge("A dog on a beach in spring. (c) Smith 2012", boilerplate=DATES).startswith("A dog")
    assert judge("A dog. (c) Smith 2012", boilerplate=DATES) == ("boilerplate", "0.67 of the characters")
    assert judge("A dog. (c) Smith 2012", boilerplate=DATES, max_boilerplate=0.7).startswith("A dog")
    assert judge("photographed on 1 May\nat a beach", boilerplate=DATES)[0] == "boilerplate"  # line ends too
    assert judge("a cat up", boilerplate=["a cat", "none"], max_boilerplate=5 / 8) == "a cat up"  # 5 of 8, no more
    assert judge("a cat up", boilerplate=["none"], max_boilerplate=0.0) == "a cat up"
    assert judge("(c) Smith 2012", boilerplate=[]) == "(c) Smith 2012"


def test_a_pattern_takes_no_more_time_than_the_caption_is_long():
    """Python's own `re` takes 2^n steps for this one."""
    caption = "a" * 50_000 + "!"
    assert judge(caption, boilerplate=[r"(?:a+)+$", r"(a|aa)+$"]) == caption


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"boilerplate": ["fine", "(a"]}, r"filter.boilerplate.1: '\(a' is no regular expression of RE2 .*missing \)"),
        ({"boilerplate": ["(?=a)"]}, "filter.boilerplate.0: .*no look-around"),
        ({"min_caption_words": 0}, "filter.min_caption_words is 0"),
        ({"min_ascii_letters": 1.1}, "filter.min_ascii_letters is 1.1: give a share"),
        ({"max_boilerplate": -1}, "filter.max_boilerplate is -1"),
        ({"language_confidence": 2}, "filter.language_confidence is 2"),
    ],
)
def test_bad_rules(rules, message):
    with pytest.raises(ValueError, match=message) as error:
        Filter(**rules)
    assert "\n" not in str(error.value)


def test_a_filter_goes_to_worker_processes():
    found = pickle.loads(pickle.dumps(Filter(boilerplate=DATES, min_caption_words=2)))
    assert found.caption(Sample("k", b"", "photographed on 1.1.")).reason == "boilerplate"


@pytest.fixture
def identifier(monkeypatch):
    """Stands for py3langid: tells German and English by a word, with a probability."""

    def classify(text):
        words = set(text.lower().split())
        return ("de", 0.9) if "ein" in words else ("en", 0.8) if "a" in words else ("om", 0.1)

    found = SimpleNamespace(labels=["de", "en", "om"], classify=classify)
    monkeypatch.setattr(captions, "_identifier", lambda: found)


@pytest.mark.parametrize(
    "date",
    ["03/05/15", "20.04.98", "1.1.", "3-5", "March 3", "Mar. 3rd", "3 May", "the 3rd of May", "Monday, 3 Sept '10",
     "May 3rd, 2015", "2015-03-05", "3 March 2010", "a rainy day in the summer of 1998"],
)  # fmt: skip
def test_dates_of_the_filter_of_dalle(identifier, date):
    found = dalle()
    assert found.caption(Sample("k", b"", f"Photographed on {date}")).reason == "boilerplate"
    assert found.caption(Sample("k", b"", f"a dog, taken on {date}")).reason == "boilerplate"


def test_numbers_are_no_dates_for_the_filter_of_dalle(identifier):
    for caption in (
        "a bus on 3 wheels",
        "a tower seen at 3.5 km",
        "a bird seen on 12 marble stairs",
        "a lighthouse seen at dusk from the pier with 1000 gulls",
        "a bridge seen in 2015 by tourists on a boat",  # of which `seen in 2015` says nothing about the image
    ):
        assert dalle().caption(Sample("k", b"", caption)) == caption


def test_language(identifier):
    assert judge("ein Hund", language="en") == ("other_language", "de with probability 0.90")
    assert judge("ein Hund", language="de") == "ein Hund"
    assert judge("balloon", language="en") == "balloon"  # of no language in particular
    assert judge("ein Hund", language="en", language_confidence=0.9)[0] == "other_language"
    assert judge("balloon", language="en", language_confidence=0.0)[0] == "other_language"
    with pytest.raises(ValueError, match="filter.language is 'english': give one of de, en, om"):
        Filter(language="english")


def test_language_by_the_package_itself():
    captions._identifier.cache_clear()
    assert judge("a photograph of a dog on a beach", language="en") == "a photograph of a dog on a beach"
    assert judge("ein Hund läuft am Strand entlang und bellt", language="en")[0] == "other_language"
    assert judge("cat", language="en") == "cat"


def test_every_reason_is_explained():
    assert {"other_letters", "other_language", "boilerplate", "short_caption"} <= REASONS.keys()


def test_the_published_recipes_rules():
    """Boilerplate, dates and other languages go; captions with a date or a number in them stay."""
    filter = dalle()
    kept = [
        "a music video of a band on a stage in 1999",
        "Paris in spring, the Eiffel tower from across the river. 12 May 2012",
        "an abc of animals",
        "photographs on a wall",
        "the seen and the unseen, a painting of 1910 in oil on canvas",
    ]
    assert [outcome(filter, caption) for caption in kept] == kept
    aside = [
        "Photographed on the 3rd of June 2005",
        "Pictured in London, 12 July 1999",
        "DSC_0012 14.05.2010",
        "(c) by the photographer",
        "image 12345",
        "May 12th, 2011: posted on 14 May 2011",
    ]
    assert [outcome(filter, caption)[0] for caption in aside] == ["boilerplate"] * len(aside)
    others = ["ein Hund läuft am Strand entlang", "un chat noir sur le toit de la maison"]
    assert [outcome(filter, caption)[0] for caption in others] == ["other_language"] * len(others)
    assert outcome(filter, "собака бежит по пляжу")[0] == "other_letters"
    assert outcome(dalle(language=None), "собака бежит по пляжу") == "собака бежит по пляжу"
    assert outcome(filter, "cat")[0] == "short_caption"


def test_vocabulary_dvae_and_tokens_have_one_filter():
    """The transformer's captions and images are those that its vocabulary and its dVAE are made from."""
    encode = load_config(ROOT / "yamls" / "dalle_encode.yaml", [], EncodeConfig, missing=[])
    vocabulary = load_config(ROOT / "yamls" / "dalle_vocabulary.yaml", [], VocabularyConfig, missing=[])
    dvae = load_config(ROOT / "yamls" / "dvae.yaml", [], Recipe, missing=[])
    components = [encode.filter, vocabulary.filter, dvae.data.args["filter"], dvae.evals["val"].args["filter"]]
    one, *others = [build(component) for component in components]
    assert one.captions.language == "en" and one.min_side == 256 and (one.min_aspect, one.max_aspect) == (0.5, 2.0)
    for other in others:
        assert vars(other.captions) == vars(one.captions)
        assert {**vars(other), "captions": None} == {**vars(one), "captions": None}
