"""Processes that take the stub for a GPU (see `benchmarks.stub_gpu`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.stub_gpu.build import build, variables, why_not

ROOT = Path(__file__).resolve().parents[1]
needs_stub_gpu = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def run_on_stub_gpu(folder, *arguments, timeout, **environment):
    """Run Python with arguments; the library is built in the folder. Returns the finished process."""
    stub = folder / "stub"
    stub.mkdir()
    environment = os.environ | variables(build(stub)) | {"PYTHONPATH": str(ROOT)} | environment
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
