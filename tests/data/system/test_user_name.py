"""A process whose user has no entry in /etc/passwd, as in containers that run under any user id."""

import os
import pwd
import re
from pathlib import Path

import pytest

from data.system.user_name import set_user_name

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def without_name(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_the_compiler_finds_a_folder_for_a_user_without_a_name(without_name):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    set_user_name()
    assert default_cache_dir().endswith(f"/torchinductor_{os.getuid()}")


def test_a_name_stays(monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody")
    set_user_name()
    assert os.environ["LOGNAME"] == "somebody"


COMMANDS = ("recipes/train.py", "recipes/evaluate.py", "recipes/generate.py", "precompute/encode.py")


@pytest.mark.parametrize("script", COMMANDS)
def test_commands_that_compile_set_it(script):
    assert re.search(r"^    set_user_name\(\)$", (ROOT / script).read_text(encoding="utf-8"), re.MULTILINE)
