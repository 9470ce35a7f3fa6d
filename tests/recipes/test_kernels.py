"""All Triton kernels on the CPU, by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_kernels_in_the_interpreter():
    """In one process of their own: the variable has to be set before triton is imported. They take no fixtures, whose
    modules would be imported anew."""
    files = sorted(map(str, Path(__file__).parent.glob("**/*_interpreted.py")))
    assert len(files) == 3
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", *files]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
