import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data.system.threads import set_default_threads

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is restored after the test, whatever it sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.parametrize(
    ("ranks", "spare", "threads"),
    [(None, 1, 7), (None, 0, 8), (2, 1, 3), (3, 0, 2), (8, 1, 1), (20, 0, 1), ("", 9, 1), (0, 1, 7), ("x", 1, 7)],
)
def test_cores_are_divided_among_the_processes(monkeypatch, ranks, spare, threads):
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    set_default_threads(spare)
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    set_default_threads()
    assert os.environ["OMP_NUM_THREADS"] == "3"


# They compute nothing with torch's threads, or, as the doctor, tell the user of the variable that is set.
OTHERS = {
    "recipes/compare.py",
    "recipes/doctor.py",
    "recipes/engines/checkpoints/copy_process.py",
    "precompute/pack.py",
    "precompute/output/upload_process.py",
    "precompute/vocabulary.py",
}


def commands() -> dict[str, str]:
    """The contents of each command, by its path in the repository."""
    files = [path for room in ("recipes", "precompute") for path in (ROOT / room).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    return {path: text for path, text in texts.items() if "__main__" in text}


def test_commands_set_their_threads():
    assert {path for path, text in commands().items() if "set_default_threads(" not in text} == OTHERS


def test_commands_do_not_import_torch_before_they_set_their_threads():
    """Afterwards the variable has no effect. And --help and mistakes would wait for it."""
    paths = [str(ROOT / path) for path in commands()]
    code = (
        f"import runpy, sys\nfor path in {paths!r}:\n    runpy.run_path(path)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{path} imports torch first')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_benchmarks_that_train_set_their_threads():
    """Before they import anything that may import torch: afterwards the variable has no effect."""
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")}
    training = ("build_trainer(", "recipes.train ", "precompute.encode ", "forkserver")
    commands = {name for name, text in files.items() if "__main__" in text and any(word in text for word in training)}
    assert {"levers.py", "overhead.py", "rank_curves.py", "soak.py", "killing.py", "gpu.py"} <= commands
    for name in commands - {"network_rank.py"}:  # whose launcher, network.py, sets the variable
        before, call, _ = files[name].partition("set_default_threads()")
        assert call, f"{name} does not call set_default_threads"
        at_import = re.findall(r"^(?:import|from) ([\w.]+)", before, re.MULTILINE)
        own = [module for module in at_import if module.split(".")[0] not in sys.stdlib_module_names]
        code = f"import sys, {', '.join(own)}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0, f"{name} imports torch first"
