"""The docs are true: every command would run, links and paths exist, examples work, generated pages are up to date."""

import ast
import importlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from precompute.config import EncodeConfig, VocabularyConfig
from precompute.texts.pack_config import PackConfig
from recipes.config.command_line import FLAGS
from recipes.config.components import COMPONENTS
from recipes.config.recipe import Recipe, load_config
from recipes.encoders.base import LatentEncoder, TextEncoder, TokenEncoder
from recipes.models.latent_diffusion.denoiser import Denoiser
from recipes.models.latent_diffusion.objective import Objective

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "recipes/train.py": Recipe,
    "precompute/encode.py": EncodeConfig,
    "precompute/vocabulary.py": VocabularyConfig,
    "precompute/pack.py": PackConfig,
}
# Where a script's options are, if not in itself.
OPTIONS = {
    "cluster/submit.py": ["cluster/command_line.py"],
    "recipes/evaluate.py": ["recipes/evaluation/retrieval_command.py", "recipes/generation/options.py"],
    "recipes/generate.py": ["recipes/generation/options.py"],
}
# What a block of docs/extending.md says in its first line: the file that it is, or the group of its lines in the table.
FILE_LINE = re.compile(r"^# ([\w/]+\.(?:py|yaml))\n")
TABLE_LINE = re.compile(r'^# recipes/config/components\.py, group "(\w+)"\n')
LAUNCHERS = {"python", "python3", "composer", "torchrun"}
PAGES = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
YAMLS = sorted((ROOT / "yamls").glob("*.yaml"))
# Other programs that the docs may name; only the name is checked.
OTHERS = {"git", "cd", "docker", "tensorboard", "ls", "nvidia-smi", "pytest", "aws", "curl", "export", "hadolint"}
OTHERS |= {"hf", "source", "wandb"}


def blocks(text, languages):
    """The contents of a page's code blocks in the given languages."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, name, body in found if name in languages]


def commands(text):
    """The commands of shell text, each split into words, without comments, prompts and line continuations."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:&&|\|\||\||;)\s", line.strip().removeprefix("$ ")):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def header_command(path):
    """The command at the top of a YAML."""
    header = "\n".join(line.removeprefix("#") for line in path.read_text().split("\n") if line.startswith("#"))
    return re.search(r"^ Command:? +(.*?(?:\\\n.*?)*)$", header, re.MULTILINE)[1]


def problem(words):
    """What would go wrong with a documented command, or None."""
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
        return f"make has no target {unknown}" if unknown else None
    if program not in LAUNCHERS:
        return None if program in OTHERS else f"unknown program {program}"
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        return None if words[1] == "-m" else "names no script"
    script, arguments = words[place], words[place + 1 :]
    if not (ROOT / script).is_file():
        return f"no file {script}"
    if script in SCRIPTS:
        return yaml_problem(SCRIPTS[script], [a for a in arguments if a not in FLAGS])
    source = (ROOT / script).read_text()
    source += "".join((ROOT / file).read_text() for file in OPTIONS.get(script, ()))
    if "recipes/generation/options.py" in OPTIONS.get(script, ()):  # it has the options of all model families
        source += "".join(file.read_text() for file in (ROOT / "recipes" / "models").glob("*/family.py"))
    unknown = [a for a in arguments if a.startswith("--") and f'"{a.split("=")[0]}"' not in source]
    return f"{script} has no {unknown}" if unknown else None


def yaml_problem(cls, arguments):
    """The error of a command line for the config `cls`, or None."""
    if arguments == ["--help"]:
        return None
    try:
        config = load_config(ROOT / arguments[0], arguments[1:], cls, [])
    except ValueError as error:
        return str(error)
    for argument in arguments:
        if argument.startswith("sources=") and (others := config.sources.keys() - yaml.safe_load(argument[8:]).keys()):
            return f"reads the YAML's own sources {sorted(others)}, too, which a user does not have"
    return None


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_command_in_the_docs_would_run(page):
    text = page.read_text()
    found = [words for body in blocks(text, ("bash", "sh", "console")) for words in commands(body)]
    problems = {shlex.join(words): problem(words) for words in found}
    assert {command: wrong for command, wrong in problems.items() if wrong} == {}
    for body in blocks(text, ("yaml",)):
        yaml.safe_load(body)
    unnamed = [body for body in blocks(text, ("",)) if re.search(r"^(\$ )?(make|python|composer) ", body, re.MULTILINE)]
    assert not unnamed, "write ```bash, so that the commands are checked"


def prose(page):
    """The text of a page without its code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def headings(page):
    """The headings of a page, as links name them."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, heading = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"no file for {target}"
        assert not heading or heading in headings(linked), f"no heading for {target}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_paths_in_the_text_exist(page):
    """Files of this repository, written `data/crops.py`; runs/ is what a run would write."""
    named = re.findall(r"`((?:benchmarks|callbacks|data|docs|precompute|recipes|tests|yamls)/[\w./]*)`", prose(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_python_in_the_docs_compiles(page):
    for body in blocks(page.read_text(), ("python",)):
        # A line of a table is the inside of a dict.
        ast.parse(body if "{" not in body.split("\n")[0] and not TABLE_LINE.search(body) else f"{{{body}}}")


def test_extending_says_which_room_may_import_which():
    arrows = runpy.run_path(str(ROOT / "tests" / "recipes" / "test_imports.py"))["ARROWS"]
    divided = ("data", "precompute", "recipes/planning")  # which have one row each
    whole = {room: next((place for place in divided if room.startswith(f"{place}/")), room) for room in arrows}
    rooms: dict[str, set[str]] = {}
    for room in arrows.keys() - {"docs"}:
        others = {whole[other] for other in arrows[room]}
        rooms.setdefault(whole[room], set()).update(others - {whole[room]})
    page = prose(ROOT / "docs" / "extending.md")
    table = re.findall(r"^\| \[([\w/]+)\]\(\.\./\1\) \| .+ \| (.+) \|$", page, re.MULTILINE)
    full = {room.removeprefix("recipes/"): room for room in rooms}
    above: set[str] = set()
    for room, sentence in table:
        if sentence == "nothing below":
            named = set()
        elif sentence.startswith("everything above but "):
            named = above - {full[sentence.removeprefix("everything above but ")]}
        else:
            named = {full[name] for name in sentence.split(", ")}
        assert named == rooms[room], f"docs/extending.md: {room} may import from {rooms[room]}"
        above.add(room)
    assert above == set(rooms)


@pytest.mark.parametrize("path", YAMLS, ids=[path.name for path in YAMLS])
def test_the_command_at_the_top_of_a_yaml_would_run(path):
    (words,) = commands(header_command(path))
    assert problem(words) is None
    assert f"yamls/{path.name}" in words


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_usage_of_a_script_would_run(script):
    usage = (ROOT / script).read_text().split('"""')[1]
    found = [words for line in usage.splitlines() if line.startswith("    ") for words in commands(line)]
    assert found
    problems = {shlex.join(words): problem(words) for words in found}
    assert {command: wrong for command, wrong in problems.items() if wrong} == {}


def asked_for(target):
    """The parameters before `*` of a builder, read from its source."""
    module, name = target.split(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    builder = next(node for node in tree.body if getattr(node, "name", None) == name)
    if isinstance(builder, ast.ClassDef):
        builder = next(node for node in builder.body if getattr(node, "name", None) == "__init__")
    return {argument.arg for argument in builder.args.args} - {"self"}


def test_extending_lists_every_object_that_builders_ask_for():
    table = re.findall(r"^\| (.+?) \| (.+) \|$", prose(ROOT / "docs" / "extending.md"), re.MULTILINE)
    start = next(i for i, row in enumerate(table) if row[0] == "group")
    rows = table[start + 2 : next(i for i, row in enumerate(table) if row[0] == "all others")]
    # An object is named at the start of its entry; other code in the text explains it.
    documented: dict[str, set[str]] = {}
    for groups, objects in rows:
        for group in re.findall(r"`(\w+)`", groups):
            documented.setdefault(group, set()).update(re.findall(r"(?:^|; )`(\w+)`", objects))
    assert documented.keys() <= COMPONENTS.keys()
    missing = {
        f"{group} {name}": wanted
        for group, builders in COMPONENTS.items()
        for name, target in builders.items()
        if (wanted := asked_for(target) - documented.get(group, set()))
    }
    assert missing == {}


@pytest.mark.parametrize("base", [LatentEncoder, TokenEncoder, TextEncoder, Denoiser, Objective])
def test_extending_names_what_a_subclass_must_define(base):
    page = (ROOT / "docs" / "extending.md").read_text()
    (part,) = (part for part in re.split(r"^## |^\| ", page, flags=re.MULTILINE) if f"`{base.__name__}`" in part)
    assert {name for name in base.__abstractmethods__ if f"`{name}" not in part} == set()


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the repository with the examples of two pages in it, and the paths of the new files."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("callbacks", "data", "precompute", "recipes", "yamls"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    table, files = root / "recipes" / "config" / "components.py", []
    text = "".join((ROOT / "docs" / name).read_text() for name in ("extending.md", "sd2.md"))
    for body in blocks(text, ("python", "yaml")):
        if group := TABLE_LINE.match(body):
            text = table.read_text()
            assert f'    "{group[1]}": {{\n' in text, f"the table has no group {group[1]}"
            lines = "".join(f"        {line}\n" for line in body.split("\n")[1:] if line)
            table.write_text(text.replace(f'    "{group[1]}": {{\n', f'    "{group[1]}": {{\n{lines}'))
        elif file := FILE_LINE.match(body):
            path = root / file[1]
            assert not path.exists(), f"docs: {file[1]} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body[file.end() :])
            files.append(path)
    return root, files


def test_the_examples_of_extending_pass_their_tests(extended, tmp_path, monkeypatch):
    """In this process, which has imported the large libraries already: new files join the packages that they lie in."""
    root, files = extended
    new = [file.relative_to(root) for file in files if file.suffix == ".py"]
    for file in new:
        folder = next(folder for folder in file.parents if (ROOT / folder).is_dir())
        if folder.parts[0] != "tests":
            package = importlib.import_module(".".join(folder.parts))
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(root / folder)])
    modules = {".".join(file.with_suffix("").parts) for file in new}
    try:
        tests = [
            (name, test)
            for file in new
            if file.parts[0] == "tests"
            for name, test in runpy.run_path(str(root / file)).items()
            if name.startswith("test_")
        ]
        assert tests
        for name, test in tests:
            (tmp_path / name).mkdir()
            test(**{"tmp_path": tmp_path / name} if "tmp_path" in inspect.signature(test).parameters else {})
    finally:
        for module in modules & sys.modules.keys():
            del sys.modules[module]


def test_the_lever_of_extending_takes_weights_that_are_divided_over_cpus(one_rank):
    found = blocks((ROOT / "docs" / "extending.md").read_text(), ("python",))
    (code,) = (body for body in found if "def centralize(" in body)
    names: dict = {}
    exec(code, names)
    mesh, gradient = init_device_mesh("cpu", (1,)), torch.randn(3, 4)
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)]))  # as in tensor parallelism
    weight.grad = distribute_tensor(gradient, mesh, [Shard(1)])
    names["centralize"]([weight])
    torch.testing.assert_close(weight.grad.full_tensor(), gradient - gradient.mean(1, keepdim=True))


def test_the_examples_of_extending_are_accepted_by_the_config_and_the_linter(extended):
    root, files = extended
    code = (
        "import sys; from recipes.config.recipe import Recipe, load_config; from precompute.config import EncodeConfig;"
        "[load_config(f, [], EncodeConfig if f.endswith('_encode.yaml') else Recipe, []) for f in sys.argv[1:]]"
    )
    yamls = [str(file) for file in files if file.suffix == ".yaml"]
    assert yamls
    env = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run([sys.executable, "-c", code, *yamls], cwd=root, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ruff = Path(sys.executable).parent / "ruff"
    if ruff.exists():
        result = subprocess.run([ruff, "check", "--no-cache", root], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_the_recipes_page_is_up_to_date(tmp_path):
    out = tmp_path / "recipes.md"
    command = [sys.executable, str(ROOT / "docs" / "make_recipes.py"), "--out", str(out)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_text() == (ROOT / "docs" / "recipes.md").read_text(), "run make docs"


def test_wrong_commands_are_found():
    assert problem(["make", "quickstrat"]) == "make has no target ['quickstrat']"
    assert problem(["python", "recipes/trian.py"]) == "no file recipes/trian.py"
    assert problem(["python", "docs/make_recipes.py", "--to", "x"]) == "docs/make_recipes.py has no ['--to']"
    assert problem(["python", "recipes/generate.py", "x", "--step", "9"]) == "recipes/generate.py has no ['--step']"
    assert problem(["python", "recipes/generate.py", "x", "--steps", "9"]) is None
    assert problem(["composer", "-n", "8", "recipes/train.py", "yamls/sd2_base.yaml", "--dry-run"]) is None
    assert "seed: expected int" in problem(["composer", "recipes/train.py", "yamls/sd2_base.yaml", "seed=a"])
    assert "no such YAML" in problem(["python", "precompute/encode.py", "yamls/no.yaml"])
    own = "sources={train: {name: folder, path: pictures}}"
    assert "own sources ['val']" in problem(["python", "precompute/encode.py", "yamls/sd2_encode.yaml", own])
    text = "```bash\n$ A=1 make test && make docs  # both\npython x.py \\\n  'a=b c'\n```\n"
    (body,) = blocks(text, ("bash",))
    assert list(commands(body)) == [["make", "test"], ["make", "docs"], ["python", "x.py", "a=b c"]]
