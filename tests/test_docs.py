"""The docs say what is so: every command would run, links lead somewhere, generated pages are up to date."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from precompute.config import EncodeConfig, VocabularyConfig
from recipes.config.recipe import Recipe, load_config

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "recipes/train.py": Recipe,
    "precompute/encode.py": EncodeConfig,
    "precompute/vocabulary.py": VocabularyConfig,
}
LAUNCHERS = {"python", "python3", "composer", "torchrun"}
PAGES = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
YAMLS = sorted((ROOT / "yamls").glob("*.yaml"))
# Documented commands of other programs: nothing to check but that they are meant.
OTHERS = {"git", "cd", "docker", "tensorboard", "ls", "nvidia-smi", "pytest", "aws", "curl", "export", "hadolint"}


def blocks(text, languages):
    """The contents of a page's code blocks in some languages."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, name, body in found if name in languages]


def commands(text):
    """The commands of shell text, as words; comments, prompts and line continuations are taken away."""
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
        return yaml_problem(SCRIPTS[script], [a for a in arguments if a != "--dry-run"])
    source = (ROOT / script).read_text()
    unknown = [a for a in arguments if a.startswith("--") and f'"{a.split("=")[0]}"' not in source]
    return f"{script} has no {unknown}" if unknown else None


def yaml_problem(cls, arguments):
    """What a config says of its arguments."""
    if arguments == ["--help"]:
        return None
    try:
        load_config(ROOT / arguments[0], arguments[1:], cls, [])
    except ValueError as error:
        return str(error)
    return None


def test_there_is_a_readme():
    assert (ROOT / "README.md").is_file()


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


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, f"no heading for {target}"
        elif "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target.split("#")[0]).exists(), f"no file for {target}"


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
    assert problem(["composer", "-n", "8", "recipes/train.py", "yamls/sd2_base.yaml", "--dry-run"]) is None
    assert "seed: expected int" in problem(["composer", "recipes/train.py", "yamls/sd2_base.yaml", "seed=a"])
    assert "no such YAML" in problem(["python", "precompute/encode.py", "yamls/no.yaml"])
    text = "```bash\n$ A=1 make test && make docs  # both\npython x.py \\\n  'a=b c'\n```\n"
    (body,) = blocks(text, ("bash",))
    assert list(commands(body)) == [["make", "test"], ["make", "docs"], ["python", "x.py", "a=b c"]]
