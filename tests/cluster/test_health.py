"""What the image's health check finds wrong."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.health import health, main
from recipes.training.heartbeat import VARIABLE, HeartbeatFile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def beat(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "beats"))
    return HeartbeatFile().write


def found(tmp_path, *lines):
    """(level, subject) of what is found where the driver lists these GPUs."""
    program = tmp_path / "smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    return [(finding.level, finding.subject) for finding in health(tmp_path / "beats", (str(program),))]


def test_a_run_that_goes_on_is_healthy_and_one_that_hangs_is_not(beat, capsys):
    assert main([]) == 0  # starting, or something else than training
    beat(math.inf, "step_end", False)
    assert main([]) == 0
    beat(0.0, "before_backward", False)
    assert main([]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"error:   run: process {os.getpid()} has shown no sign of life since before_backward"


def test_a_run_whose_gpu_is_lost_is_not_healthy(tmp_path, beat):
    beat(math.inf, "step_end", True)
    assert found(tmp_path, "0, 0") == [("ok", "run"), ("ok", "GPUs")]
    assert found(tmp_path, "0, [GPU is lost]") == [("ok", "run"), ("error", "GPUs")]
    assert found(tmp_path) == [("ok", "run"), ("error", "GPUs")]
    beat(math.inf, "step_end", False)  # nobody asks the driver about a run on the CPU
    assert found(tmp_path) == [("ok", "run")]


def test_it_imports_no_torch():
    code = "import sys, cluster.health; sys.exit('torch' in sys.modules or 'composer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_without_a_folder_it_says_what_to_set(monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert VARIABLE in capsys.readouterr().err
