"""The checker, on made-up components: types, nesting, and messages with the key and the most similar name."""

import ast
import errno
import textwrap
from unittest.mock import Mock

import pytest

from recipes.config import schema, source_code
from recipes.config.components import COMPONENTS
from recipes.config.schema import Checker, nearest, read_section, read_signature, type_text
from recipes.config.values import Component

UNITS = "give a whole number of ba, ep or sp, such as 500ba, or a share of the run, such as 0.5dur"
TOYS = '''
def plain(
    *,
    count: int,
    share: float = 0.5,
    on: bool = False,
    word: str = "a",
    mode: Literal["fast", "slow"] = "fast",
    size: int | Literal["auto"] | None = None,
    sizes: list[int] = (1, 2),
    pair: tuple[float, float] = (0.9, 0.999),
    many: tuple[int, ...] = (),
    texts: str | list[str] = "",
    weights: dict[str, float] | None = None,
    extra: dict[str, Any] | None = None,
    every: Duration = "1ba",
    folder: InputPath | None = None,
    weights_of: ModelPath | None = None,
):
    """Everything at once.

    The second paragraph is not part of the description.

    Args:
        count: how many,
            on two lines.
        share (float): a share.
    """


class Outer:
    """Holds others."""

    def __init__(
        self,
        given,
        *,
        inner: Annotated[Any, "toy"],
        maybe: Annotated[Any, "toy"] | None = None,
        labelled: dict[str, Annotated[Any, "toy"]] = {},
        several: list[Annotated[Any, "toy"]] = (),
    ):
        """
        Args:
            inner: the one inside.

        Raises:
            ValueError: never.
        """


def empty():
    """Takes nothing."""
'''
GROUPS = {"toy": {"plain": "toys.parts:plain", "outer": "toys.parts:Outer", "empty": "toys.parts:empty"}}


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch):
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "parts.py").write_text(textwrap.dedent(TOYS))
    monkeypatch.setattr(source_code, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    source_code.module_tree.cache_clear()
    schema.read_signature.cache_clear()


def check(**args):
    """(component, errors, missing) of the component at the path `x`; a `plain` toy where no name is given."""
    checker = Checker(GROUPS)
    component = checker.component("toy", {"name": "plain", "count": 1, **args}, "x")
    return component, checker.errors, checker.missing


def checked(key, value):
    """The value of a key after checking, which must find nothing."""
    component, errors, _ = check(**{key: value})
    assert errors == []
    return component.args[key]


def complaint(key, value):
    """The one error that a value gives."""
    component, errors, _ = check(**{key: value})
    assert component is None
    (error,) = errors
    return error


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("count", 1e3, 1000),
        ("count", 10**400, 10**400),
        ("share", 1, 1.0),
        ("share", 1e-4, 1e-4),
        ("on", True, True),
        ("word", "b", "b"),
        ("word", 5, "5"),
        ("word", True, "true"),
        ("texts", ["a", False], ["a", "false"]),
        ("count", "1_000", 1000),
        ("share", "1e-4", 1e-4),
        ("on", "yes", True),
        ("extra", {"a": "1e3"}, {"a": 1000.0}),
        ("extra", {"a": {"b": ["1e3", {3: "yes"}, None, "x"]}}, {"a": {"b": [1000.0, {"3": True}, None, "x"]}}),
        ("mode", "slow", "slow"),
        ("size", "auto", "auto"),
        ("size", None, None),
        ("size", 8.0, 8),
        ("sizes", [1, 2e0], [1, 2]),
        ("sizes", [], []),
        ("pair", [0.9, 1], (0.9, 1.0)),
        ("many", [1, 2, 3], (1, 2, 3)),
        ("texts", "a", "a"),
        ("texts", ["a", "b"], ["a", "b"]),
        ("weights", {"a": 1}, {"a": 1.0}),
        ("weights", {"a": None}, {}),
        ("extra", {"a": None, "b": [1]}, {"a": None, "b": [1]}),
        ("every", "500ba", "500ba"),
        ("every", "0.25dur", "0.25dur"),
        ("weights_of", "owner/name", "owner/name"),
        ("folder", "s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_a_value_becomes_its_type(key, value, result):
    got = checked(key, value)
    assert got == result
    assert type(got) is type(result)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", "1000", "x.count: expected int, got '1000'"),
        ("count", 1.5, "x.count: expected int, got 1.5"),
        ("count", True, "x.count: expected int, got True"),
        ("count", float("inf"), "x.count: expected int, got inf"),
        ("count", None, "x.count: expected int, got null"),
        ("share", True, "x.share: expected float, got True"),
        ("share", float("nan"), "x.share: got nan; give a finite number, at most 3.4e+38"),
        ("share", ".inf", "x.share: got inf; give a finite number, at most 3.4e+38"),
        ("share", "1e39", "x.share: got 1e+39; give a finite number, at most 3.4e+38"),
        ("share", -(10**400), f"x.share: got -1{'0' * 55}...; give a finite number, at most 3.4e+38"),
        ("share", "much", "x.share: expected float, got 'much'"),
        ("on", 1, "x.on: expected bool, got 1"),
        ("on", "true", "x.on: expected bool, got 'true'"),
        ("word", [1], "x.word: expected str, got [1]"),
        ("mode", "fats", "x.mode: got 'fats'; did you mean `fast`?"),
        ("mode", "zzz", 'x.mode: expected "fast" | "slow", got \'zzz\''),
        ("mode", 1, 'x.mode: expected "fast" | "slow", got 1'),
        ("size", 1.5, 'x.size: expected int | "auto" | null, got 1.5'),
        ("size", "autoo", "x.size: got 'autoo'; did you mean `auto`?"),
        ("sizes", 3, "x.sizes: expected list[int], got 3"),
        ("sizes", [1, "b"], "x.sizes.1: expected int, got 'b'"),
        ("pair", [0.9], "x.pair: expected tuple[float, float], got [0.9]"),
        ("pair", [0.9, "b"], "x.pair.1: expected float, got 'b'"),
        ("many", [1, None], "x.many.1: expected int, got null"),
        ("texts", {"a": 1}, "x.texts: expected str | list[str], got {a: 1}"),
        ("count", "0123", "x.count: expected int, got '0123'"),
        ("count", "12:30", "x.count: expected int, got '12:30'"),
        ("weights", {"a": "b"}, "x.weights.a: expected float, got 'b'"),
        ("weights", 1, "x.weights: expected dict[str, float] | null, got 1"),
        ("every", "500", f"x.every: '500' is not a duration; {UNITS}"),
        ("every", 500, f"x.every: 500 is not a duration; {UNITS}"),
        ("every", "1.5ep", f"x.every: '1.5ep' is not a duration; {UNITS}"),
        ("every", "5ba\n", f"x.every: '5ba\\n' is not a duration; {UNITS}"),
        ("every", None, "x.every: expected duration, got null"),
        ("cuont", 3, "x.cuont: unknown key of toy `plain`; did you mean `count`?"),
    ],
)
def test_a_wrong_value_is_named(key, value, message):
    assert complaint(key, value) == message


def test_a_long_value_is_cut():
    error = complaint("count", {f"key{i}": i for i in range(100)})
    assert error.startswith("x.count: expected int, got {key0: 0, key1: 1,")
    assert len(error) < 100


def test_paths_that_are_missing_are_kept_apart_from_errors(tmp_path):
    for path in ("./nowhere", "runs/nowhere", "weights/nowhere.pth", "a/b/nowhere"):
        _, errors, missing = check(folder="nowhere", weights_of=path)
        assert errors == []
        assert missing == [
            f"x.folder: `nowhere` does not exist (looked in {tmp_path})",
            f"x.weights_of: `{path}` does not exist (looked in {tmp_path}), and it is no hub id (owner/name)",
        ]
    assert check(weights_of="openai/clip-vit-large.v1.5")[2] == []
    assert check(folder="toys", weights_of="toys/parts.py")[2] == []


def test_a_path_that_the_disk_does_not_give_is_not_called_missing(monkeypatch):
    monkeypatch.setattr(schema.Path, "exists", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    _, errors, missing = check(folder="toys", weights_of="owner/name")
    assert errors == []
    assert missing == [
        "x.folder: `toys` cannot be read (Stale file handle)",
        "x.weights_of: `owner/name` cannot be read (Stale file handle)",
    ]


def test_a_path_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checked("folder", "~/toys") == f"{tmp_path}/toys"


def test_a_missing_key_is_named_with_its_type():
    checker = Checker(GROUPS)
    checker.component("toy", {"name": "plain"}, "x")
    checker.component("toy", {"name": "outer"}, "y")
    assert checker.errors == [
        "x.count: missing of toy `plain`; expected int",
        "y.inner: missing of toy `outer`; expected toy component",
    ]


def test_all_errors_are_reported_at_once():
    errors = check(name="outer", count=1, inner={"name": "plain", "count": "a", "shear": 1}, several=[{"name": "x"}])[1]
    assert errors == [
        "x.count: unknown key of toy `outer`; did you mean `x.inner.count`?",
        "x.inner.count: expected int, got 'a'",
        "x.inner.shear: unknown key of toy `plain`; did you mean `share`?",
        "x.several.0.name: unknown toy 'x'; allowed: empty, outer, plain",
    ]


def test_components_nest():
    checker = Checker(GROUPS)
    toy = {"name": "plain", "count": 1}
    value = {"name": "outer", "inner": toy, "maybe": None, "labelled": {"a": toy, "b": None}, "several": [toy]}
    component = checker.component("toy", value, "x")
    assert checker.errors == []
    assert component.target == "toys.parts:Outer"
    assert component.args["inner"] == Component("toy", "plain", {"count": 1}, "toys.parts:plain", "x.inner")
    assert component.args["maybe"] is None
    assert list(component.args["labelled"]) == ["a"]
    assert component.args["several"][0].path == "x.several.0"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("plian", "x: got 'plian'; a toy component is written {name: ..., arguments}; did you mean `plain`?"),
        (3, "x: got 3; a toy component is written {name: ..., arguments}; allowed: empty, outer, plain"),
        ({}, "x.name: missing; allowed: empty, outer, plain"),
        ({"nmae": "plain"}, "x.nmae: unknown key of a toy component; did you mean `name`?"),
        ({"name": "plian"}, "x.name: unknown toy 'plian'; did you mean `plain`?"),
        ({"name": None}, "x.name: unknown toy None; allowed: empty, outer, plain"),
        ({"name": ["plain"]}, "x.name: unknown toy [plain]; did you mean `plain`?"),
        ({"name": "empty", "a": 1}, "x.a: unknown key of toy `empty`; nothing is allowed here"),
    ],
)
def test_what_is_no_component_is_named(value, message):
    checker = Checker(GROUPS)
    assert checker.component("toy", value, "x") is None
    assert checker.errors == [message]


def test_signatures_are_read_without_an_import():
    signature = read_signature("toys.parts:plain")
    assert signature.doc == "Everything at once."
    assert signature.parameters["count"].doc == "how many, on two lines."
    assert signature.parameters["count"].required
    assert signature.parameters["share"].doc == "a share."
    assert signature.parameters["sizes"].default == "[1, 2]"
    assert signature.parameters["size"].default == "null"
    assert read_signature("toys.parts:Outer").doc == "Holds others."
    assert read_signature("toys.parts:Outer").parameters["inner"].doc == "the one inside."


def test_type_text():
    def text(annotation):
        return type_text(ast.parse(annotation, mode="eval").body)

    assert text('dict[str, Annotated[Any, "stream"]] | None') == "dict[str, stream component] | null"
    assert text('int | Literal["auto", 3]') == 'int | "auto" | 3'
    assert text("tuple[float, ...]") == "tuple[float, ...]"
    assert text("ModelPath") == "existing path or hub id"


def test_nearest():
    assert nearest("lern", ["learn", "other"]) == "did you mean `learn`?"
    assert nearest("zzz", ["b", "a"]) == "allowed: a, b"
    assert nearest("zzz", []) == "nothing is allowed here"


@pytest.mark.parametrize(
    ("code", "target", "message"),
    [
        ("", "Smal", "FILE: no function or class `Smal`; did you mean `Small`?"),
        ("", ".nothing:Small", "toys.wrong.nothing: no such module (looked in ROOT/toys)"),
        ("class Bare: ...", "Bare", "FILE: Bare has no __init__ of its own, which lists its keys"),
        ("def untyped(*, size=1): ...", "untyped", "FILE: untyped: the key `size` has no type"),
        ("def computed(*, size: int = 2 * 3): ...", "computed", "FILE: computed: the default of `size` is no literal"),
        ("def broken(:", "broken", "FILE: line 2: invalid syntax"),
    ],
)
def test_a_wrong_line_of_the_table_is_one_line(tmp_path, code, target, message):
    file = tmp_path / "toys" / "wrong.py"
    file.write_text(f"def Small(*, size: int): ...\n{code}")
    target = f"toys.wrong{target if ':' in target else f':{target}'}"
    checker = Checker({"toy": {"mine": target}})
    assert checker.component("toy", {"name": "mine", "size": 1}, "x") is None
    message = message.replace("FILE", str(file)).replace("ROOT", str(tmp_path))
    assert checker.errors == [f"x.name: toy `mine` is {target}, which cannot be used: {message}"]


@pytest.mark.parametrize(
    "kind",
    ["'int'", "Optional[int]", "int | list", "dict[int, str]", "list[Path]", "typing.Literal['a']", "list[a, b]"],
)
def test_a_type_that_no_key_can_have(tmp_path, kind):
    (tmp_path / "toys" / "wrong.py").write_text(f"def Small(*, size: {kind}): ...")
    checker = Checker({"toy": {"mine": "toys.wrong:Small"}})
    assert checker.component("toy", {"name": "mine", "size": 1}, "x") is None
    what = f"the key `size` has the type `{kind}`, which no key can have; docs/extending.md lists the types"
    assert checker.errors[0].endswith(f"wrong.py: Small: {what}")


def test_a_component_of_a_group_that_does_not_exist(tmp_path):
    (tmp_path / "toys" / "wrong.py").write_text("def Small(*, sizes: list[Annotated[Any, 'tyo']] | None = None): ...")
    checker = Checker({"toy": {"mine": "toys.wrong:Small"}})
    assert checker.component("toy", {"name": "mine"}, "x") is None
    assert checker.errors[0].endswith("cannot be used: its key `sizes` is of the group `tyo`; did you mean `toy`?")


def test_a_source_that_is_not_utf8_is_one_line(tmp_path):
    (tmp_path / "toys" / "latin.py").write_bytes(b"def Small(*, word: str = '\xe9'): ...")
    checker = Checker({"toy": {"mine": "toys.latin:Small"}})
    assert checker.component("toy", {"name": "mine"}, "x") is None
    assert "cannot be used" in checker.errors[0] and "can't decode byte 0xe9" in checker.errors[0]


def test_a_component_that_cannot_be_used_hinders_no_other(tmp_path):
    (tmp_path / "toys" / "wrong.py").write_text("def wrong(*, size=1): ...")
    checker = Checker({"toy": {**GROUPS["toy"], "wrong": "toys.wrong:wrong"}})
    outer = checker.component("toy", {"name": "outer", "inner": {"name": "empty"}, "count": 3}, "x")
    assert outer is None
    assert checker.errors == ["x.count: unknown key of toy `outer`; did you mean `x.inner.count`?"]


# --- what this repository's own components promise -------------------------------------------------------------------

KNOWN = {"Any", "None", "bool", "int", "float", "str", "dict", "Duration", "InputPath", "ModelPath"}
LOGGED = {"task", "run_name", "output", "loading", "blank", "encoders"}
GIVEN = {
    "data": {"placement", "requirements"},
    "optimizer": {"parameters", "task"},
    "algorithm": LOGGED | {"clips", "low_rank", "samples", "scaling"},
    "callback": LOGGED | {"average", "copies", "scaling", "started_from"},
    "logger": LOGGED | {"tracked"},
}
TARGETS = [(group, target) for group, names in COMPONENTS.items() for target in names.values()]


@pytest.fixture
def real(monkeypatch):
    monkeypatch.undo()
    source_code.module_tree.cache_clear()
    schema.read_signature.cache_clear()


def leaves(node):
    """The names of the types that an annotation is made of."""
    if isinstance(node, ast.BinOp):
        return leaves(node.left) | leaves(node.right)
    if isinstance(node, ast.Subscript):
        base = ast.unparse(node.value)
        if base == "Annotated":
            assert ast.literal_eval(node.slice.elts[1]) in COMPONENTS
        if base in ("Annotated", "Literal"):
            return set()
        assert base in ("list", "tuple", "dict")
        return set().union(*map(leaves, node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]))
    return set() if isinstance(node, ast.Constant) and node.value is ... else {ast.unparse(node)}


@pytest.mark.parametrize(("group", "target"), TARGETS, ids=[target for _, target in TARGETS])
def test_a_component_is_documented_and_typed(real, group, target):
    signature = read_signature(target)
    assert signature.doc.endswith("."), "the docstring begins with a sentence"
    for parameter in signature.parameters.values():
        assert parameter.doc, f"{parameter.name} has no line in the docstring's Args"
        assert leaves(parameter.annotation) <= KNOWN, parameter.name


@pytest.mark.parametrize(("group", "target"), TARGETS, ids=[target for _, target in TARGETS])
def test_a_default_is_of_its_type(real, group, target):
    from omegaconf import OmegaConf

    for parameter in read_signature(target).parameters.values():
        if parameter.required:
            continue
        value = OmegaConf.to_container(OmegaConf.create(f"value: {parameter.default}"))["value"]
        checker = Checker(COMPONENTS)
        checker.value(parameter.annotation, value, parameter.name, {})
        assert checker.errors == []


@pytest.mark.parametrize(("group", "target"), TARGETS, ids=[target for _, target in TARGETS])
def test_a_builder_asks_for_what_it_is_given(real, group, target):
    module, _, name = target.partition(":")
    node = next(n for n in source_code.module_tree(module).body if getattr(n, "name", None) == name)
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if getattr(n, "name", None) == "__init__")
    asked = {arg.arg for arg in node.args.args} - {"self"}
    assert asked <= GIVEN.get(group, set())
    assert not node.args.posonlyargs and node.args.vararg is None and node.args.kwarg is None


def test_sections_are_documented(real):
    from precompute.config import EncodeConfig
    from recipes.config.recipe import FSDP, Checkpoints, Recipe, Training

    for section in (Recipe, Training, FSDP, Checkpoints, EncodeConfig):
        signature = read_section(section)
        assert signature.doc
        for parameter in signature.parameters.values():
            assert parameter.doc, f"{section.__name__}.{parameter.name} has no text below it"
