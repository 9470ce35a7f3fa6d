"""The project's own files: locks, Makefile, Dockerfile, licence and notice, and what must not be committed."""

import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "requirements-torch211.lock")
TARGETS = ["install", "test", "lint", "quickstart", "quickstart-tokens", "gpu", "docs", "lock", "clean", "distclean"]
MIB = 2**20
BY_SA = "https://creativecommons.org/licenses/by-sa/4.0/"


def normalise(name: str) -> str:
    """The name of a package in the form in which indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_lines(path: str) -> list[str]:
    """The lines of a requirements file, without comments."""
    lines = (line.split("#")[0].strip() for line in (ROOT / path).read_text().splitlines())
    return [line for line in lines if line]


def locked(path: str) -> dict[str, str]:
    """Package -> version, of a lock."""
    pairs = (line.split("==") for line in requirement_lines(path))
    return {normalise(name): version for name, version in pairs}


def overridden() -> dict[str, str]:
    """Package -> the whole line that overrides it in the second lock."""
    lines = requirement_lines("requirements-torch211.in")
    return {normalise(re.match(r"[\w.-]+", line)[0]): line for line in lines}


def make(*arguments: str) -> subprocess.CompletedProcess:
    """Runs make in the repository, without the variables that an outer make puts into the environment."""
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """The files that git tracks, or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_paths_of_flags_expand_the_home_folder(files):
    """Shells do not, in `--out=~/grid.png`: see `recipes.config.command_line.path_of`."""
    scripts = [file for file in files if file.suffix == ".py" and "tests" not in file.parts]
    assert not [file for file in scripts if "type=Path" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_is_sorted_pins_alone(lock):
    lines = (ROOT / lock).read_text().splitlines()
    bad = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.+]*", line)]
    assert not bad
    names = [line.split("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_direct_dependencies_are_locked():
    versions = locked("requirements.lock")
    for line in requirement_lines("requirements.in"):
        name, _, version = line.partition("==")
        assert normalise(name) in versions, f"{name}: run make lock"
        assert version in ("", versions[normalise(name)]), f"{line}: run make lock"


def test_the_second_lock_differs_only_where_torch_asks():
    first, second, overrides = locked(LOCKS[0]), locked(LOCKS[1]), overridden()
    for name, line in overrides.items():
        if "==" in line:
            assert line == f"{name}=={second[name]}", f"{line}: run make lock"
        else:
            assert name not in second, f"{name} is left out by its override"
    # torch's CUDA packages, and setuptools, for which torch 2.11 has an upper bound.
    free = re.compile(r"nvidia-|cuda-|setuptools$")
    others = {name for name in first | second if name not in overrides and not free.match(name)}
    assert {n: first.get(n) for n in others} == {n: second.get(n) for n in others}


def test_dockerfile_copies_what_exists_and_is_not_ignored():
    text = (ROOT / "Dockerfile").read_text()
    allowed = re.findall(r"^!(\S+?)/?$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        sources = [word for word in line.split() if not word.startswith("--")][:-1]
        assert sources
        for source in sources:
            assert (ROOT / source).exists(), f"COPY {source}: no such file"
            assert source in allowed, f"COPY {source}: .dockerignore leaves it out"


def test_dockerfile_runs_the_trainer_as_a_user():
    text = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["composer", "recipes/train.py"]' in text
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] not in ("root", "0")


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "exec make test" in script.read_text()
    assert subprocess.run(["bash", "-n", script]).returncode == 0


@pytest.mark.parametrize("torch", ["2.7", "2.11"])
@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_parse(target, torch):
    result = make("-n", target, f"TORCH={torch}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("target", "stages"), [("quickstart", 6), ("quickstart-tokens", 7)])
def test_quickstart_has_its_stages_in_order(target, stages):
    out = make("-n", target).stdout
    assert re.findall(rf"== (\d)/{stages}", out) == [str(stage) for stage in range(1, stages + 1)]
    named = re.findall(r"\b(?:recipes|precompute|data)/\w+\.py|\byamls/\w+\.yaml", out)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_make_names_an_unknown_torch():
    result = make("-n", "install", "TORCH=1.0")
    assert result.returncode != 0
    assert "2.7, 2.11" in result.stderr


def test_make_says_which_python_is_missing(tmp_path):
    for name in ("Makefile", *LOCKS):
        shutil.copy(ROOT / name, tmp_path)
    result = make("-C", str(tmp_path), "install", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "needs Python 3.11" in result.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(("torch", "message"), [("2.7", "Give TORCH=2.11"), ("2.11", "needs Python 3.11")])
def test_make_names_the_lock_that_arm_machines_can_install(tmp_path, monkeypatch, torch, message):
    for name in ("Makefile", *LOCKS):
        shutil.copy(ROOT / name, tmp_path)
    uname = tmp_path / "bin" / "uname"
    uname.parent.mkdir()
    uname.write_text("#!/bin/sh\necho aarch64\n")
    uname.chmod(0o755)
    monkeypatch.setenv("PATH", str(uname.parent), prepend=os.pathsep)
    result = make("-C", str(tmp_path), "install", "PYTHON=no-such-python", f"TORCH={torch}")
    assert result.returncode != 0
    assert message in result.stderr


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_bytes().strip()
    digest = hashlib.sha256(text).hexdigest()
    assert digest == "283ea6cc2997a1a70da0049e09adf9317bb60ca1b51279b65196b83a69e1996b"
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["license"] == "Apache-2.0"


def test_notice_names_the_copyright_holder_and_openmoji():
    text = (ROOT / "NOTICE").read_text()
    assert re.search(r"^Copyright \d{4} The Precompose authors$", text, re.MULTILINE)
    for words in ("OpenMoji", "https://openmoji.org", "CC BY-SA 4.0", BY_SA):
        assert words in text
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["license-files"] == ["LICENSE", "NOTICE"]


@pytest.mark.parametrize("page", ["README.md", "docs/dalle.md"])
def test_samples_are_shown_with_openmojis_attribution(page):
    text = (ROOT / page).read_text()
    assert "samples.png)" in text
    assert "(https://openmoji.org)" in text and f"[CC BY-SA 4.0]({BY_SA})" in text


def test_no_file_is_large(files):
    assert not [f"{path.relative_to(ROOT)}" for path in files if path.stat().st_size > MIB]


def test_no_file_names_a_machine_or_an_index(files):
    """Paths of home folders and addresses of package indexes differ between machines."""
    # Written in pieces, so that this file does not match itself.
    folders = "|".join(("ro" + "ot", "ho" + "me", "Us" + "ers", "wo" + "rk", "op" + "t"))
    index = "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "--(?:extra-)?" + "index-url"))
    pattern = re.compile(rf"(?<![\w.$}})/-])/(?:{folders})/[\w.]|{index}")
    found = []
    for path in files:
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for match in pattern.finditer(data.decode("utf-8", errors="replace")):
            found.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert not found
