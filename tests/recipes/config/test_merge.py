"""Properties of merging, and of writing a config as YAML and reading it back."""

import re
from unittest import mock

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipes.config import reading
from recipes.config.components import COMPONENTS
from recipes.config.reading import merge, read_values
from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.config.schema import LARGEST_FLOAT, Checker
from recipes.config.values import ConfigError

# Two cores with other work on them: a slow example is no finding.
settings.register_profile("patient")
settings.load_profile("patient")

RECIPE = """
run_name: small
model: {name: kl_autoencoder, channels: [8, 16]}
data: {name: pictures, source: {name: tars, urls: x}, resolution: 64}
optimizer: {name: adamw, lr: 1}
schedule: {name: constant, warmup: 10ba}
training: {duration: 100ba, global_batch: 10}
callbacks: {progress: {name: progress, seconds: 5}}
"""
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())
TREES = st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=12)
MAPPINGS = st.dictionaries(NAMES, TREES, max_size=3)
# Trees in which the same key is always a leaf, or always a branch: what YAMLs of one schema are.
LEAVES = st.dictionaries(st.sampled_from(["x", "y", "z"]), VALUES, max_size=3)
SHAPED = st.builds(lambda own, inner: {**own, **inner}, LEAVES, st.dictionaries(NAMES, LEAVES, max_size=3))


def leaves_of(values, path=()):
    """(path, value) of everything that is no branch."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves_of(value, (*path, key))
    else:
        yield path, values


@given(TREES)
def test_merging_with_itself_or_nothing_changes_nothing(tree):
    assert merge(tree, tree) == tree
    if isinstance(tree, dict):
        assert merge(tree, {}) == tree
        assert merge({}, tree) == tree


@given(MAPPINGS, MAPPINGS)
def test_what_lies_above_wins_and_the_rest_stays(below, above):
    merged = merge(below, above)
    assert merge(merged, above) == merged
    for path, value in leaves_of(above):
        at = merged
        for key in path:
            at = at[key]
        assert at == value or value == {}
    assert set(merged) == {*below, *above}
    assert all(merged[key] == below[key] for key in below if key not in above)


@given(SHAPED, SHAPED, SHAPED)
def test_merging_is_associative_for_one_schema(one, two, three):
    assert merge(merge(one, two), three) == merge(one, merge(two, three))


def test_merging_leaves_its_arguments_alone():
    below, above = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merge(below, above) == {"a": {"b": 1, "c": 2}}
    assert (below, above) == ({"a": {"b": 1}}, {"a": {"c": 2}})


# What a YAML file cannot hold at all: surrogates and most control characters.
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.sampled_from(
    [
        "1e3",
        "1E-4",
        "1_0",
        "0x1f",
        "on",
        "null",
        "~",
        "???",
        "${a}",
        "\\${a}",
        "\\\\${a}}",
        "a: b",
        "- a",
        "#",
        "1:30",
        "2024-01-01",
    ]
)

# Names that are no folder below runs/ are refused, and so are addresses.
NAMES = (st.text(min_size=1) | TEXTS).filter(lambda name: name.strip() and not re.search(r"[/\0]|^\.\.?$", name))


@settings(max_examples=60)
@example("sweep/0\x85b", 1.0, ["\u2028", "\x85"], 0)
@given(NAMES, st.floats(-LARGEST_FLOAT, LARGEST_FLOAT), st.lists(TEXTS), st.integers(0, 2**31 - 1))
def test_what_is_saved_reads_back_the_same(tmp_path_factory, name, lr, tags, seed):
    values = yaml.safe_load(RECIPE)
    values["optimizer"]["lr"] = lr
    values["data"]["source"]["urls"] = tags
    values |= {"run_name": name, "seed": seed}
    checker = Checker(COMPONENTS)
    config = checker.section(Recipe, values, "")
    assert checker.errors == []
    file = tmp_path_factory.getbasetemp() / "saved.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(file, [], Recipe, []) == config


def test_an_override_is_read_once_and_nobody_changes_what_it_said(tmp_path):
    (tmp_path / "recipe.yaml").write_text("once_a: {b: [1]}")
    overrides = ["once.c={d: [2], e: '${once_a.b}'}", "once.c.f=3"]

    def read():
        return read_values(tmp_path / "recipe.yaml", overrides)

    with mock.patch.object(reading, "load", wraps=reading.load) as loads:
        found, other = read(), read_values(tmp_path / "recipe.yaml", [*overrides, "once.c.d=4", "once_a.b=5"])
        assert other == {"once_a": {"b": 5}, "once": {"c": {"d": 4, "e": 5, "f": 3}}}
        expected = {"once_a": {"b": [1]}, "once": {"c": {"d": [2], "e": [1], "f": 3}}}
        assert found == expected
        found["once"]["c"]["d"].append(6)
        found["once"]["c"]["f"] = found["once_a"]["b"].append(7)
        assert read() == expected
    texts = ["{d: [2], e: '${once_a.b}'}", "3", "4", "5"]
    assert [call.args[0] for call in loads.mock_calls if isinstance(call.args[0], str)] == texts


def test_nothing_given_for_labels_says_how_to_remove_them(tmp_path):
    """The run had its validation sets all the same, without a word."""
    evals = "{a: {name: x, streams: {s: {name: y}}}, b: {name: x}}"
    (tmp_path / "recipe.yaml").write_text(f"evals: {evals}\nfsdp: {{wrap: z}}")

    def read(override):
        return read_values(tmp_path / "recipe.yaml", [override])

    for override, line in (
        ("evals={}", "evals: {} removes nothing; give evals.a=null evals.b=null"),
        ("evals.a={streams: {}}", "evals.a.streams: {} removes nothing; give evals.a.streams.s=null"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
            read(override)
    for override in ("fsdp={}", "evals.a={}", "callbacks={}"):  # sections and components stay as they are
        read(override)


@pytest.mark.parametrize(
    "text", ["runs/mine #2", "#2", "runs/a\nb", "a\r\n\r\nb", "1 # 2", "null #", "~/a\t# b", "${x} #"]
)
def test_nothing_on_the_command_line_is_a_comment(tmp_path, text):
    """The rest was left out without a word, so that a run wrote into the folder of another one."""
    (tmp_path / "recipe.yaml").write_text("x: 1")
    wanted = text.replace("${x}", "1")
    for override in (text, f" {text}\n"):
        assert read_values(tmp_path / "recipe.yaml", [f"output={override}"]) == {"x": 1, "output": wanted}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a#b", "a#b"),
        ("5\n", 5),
        ("'a #b' # c", "a #b"),
        ('"a\\n#b"', "a\n#b"),
        ("[1, 'b #c'] # d", [1, "b #c"]),
        ("{b:\n c}", {"b": "c"}),
        ("b:\n  c: 1 # d", {"b": {"c": 1}}),
        ("|\n b\n #c", "b\n#c"),
    ],
)
def test_other_values_on_the_command_line_are_those_of_yaml(tmp_path, text, value):
    (tmp_path / "recipe.yaml").write_text("{}")
    assert read_values(tmp_path / "recipe.yaml", [f"a={text}"]) == {"a": value}
