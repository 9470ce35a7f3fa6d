"""Encoded sets as a stream component of one's own may give them."""

import re
from types import SimpleNamespace

import pytest

from data.encoded.epoch_size import epoch_of
from data.encoded.sets import EncodedSet, check_sets
from data.texts import texts_cost

UNSET = dict.fromkeys(("epoch_size", "predownload", "cache_limit", "shuffle_block"))
ARGUMENTS = UNSET | {"workers": 0, "drop_last": True}


@pytest.mark.parametrize(
    "options, samples", [({}, 6), ({"repeat": 2}, 12), ({"repeat": None}, 6), ({"choose": 4}, 4)]
)
def test_a_set_has_the_options_that_it_needs(options, samples):
    """Dry runs ended with a KeyError at a set without `repeat`, which trained."""
    assert epoch_of("latents", {"a": EncodedSet("here", None, options)}, ARGUMENTS, lambda folder: 6).samples == samples


@pytest.mark.parametrize("found, what", [("here", "an instance of str"), (None, "None")])
def test_what_is_no_encoded_set_is_one_line(found, what):
    """It was an AttributeError."""
    line = f"streams.a is {what}; its component must return an EncodedSet (data/encoded/sets.py)"
    with pytest.raises(ValueError, match=f"^latents: {re.escape(line)}$"):
        check_sets("latents", {"a": found}, None)
    plan = SimpleNamespace(build=lambda streams: streams, task=SimpleNamespace(requirements=dict))
    with pytest.raises(ValueError, match=f"^texts: {re.escape(line)}$"):
        texts_cost({"streams": {"a": found}} | ARGUMENTS, plan)
