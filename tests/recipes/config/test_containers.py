"""Values of a config are what OmegaConf makes of them, whoever copies them."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipes.config.containers import checked, nested, resolved

NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = ["x", "", "???", "${a}", "${b.c}", "${c.a.b}", "${a} y", r"\${a}", r"\\${a}", "${", "${a[0]}", "${.a}"]
VALUES = st.sampled_from(TEXTS) | st.none() | st.booleans() | st.integers() | st.floats()
TREES = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.integers(0, 1), inner, max_size=3)
)
MAPPINGS = st.dictionaries(NAMES, TREES, max_size=3)


def outcome(function, *arguments):
    try:
        return repr(function(*arguments))
    except Exception as error:
        return type(error), "recursion" in str(error) or str(error)  # such a text depends on the depth of this function


@given(MAPPINGS)
@example({"a": "???", "b": "${a}"})
@example({"a": {None: 1}})
@example({"a": ["${"]})
@example({"a": {"b": [1, "${c}"]}, "b": "${a}", "c": "${oc.env:NONE,2}"})
@settings(deadline=None)
def test_files(values):
    for ours, resolve in ((checked, False), (resolved, True)):
        assert outcome(ours, values) == outcome(
            lambda resolve=resolve: OmegaConf.to_container(OmegaConf.create(values), resolve=resolve)
        )


@given(st.sampled_from(["a", "a.b", "a.b.c", "a[0].b", "a.0", "a..b", ".a", "", "A", "a b", "${a}"]), TREES)
@settings(deadline=None)
def test_overrides(key, value):
    def theirs():
        given = OmegaConf.create()
        OmegaConf.update(given, key, value)
        return OmegaConf.to_container(given, resolve=False)

    assert outcome(nested, key, value) == outcome(theirs)
