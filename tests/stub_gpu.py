"""Processes that take the stub for a GPU (see `benchmarks.stub_gpu`)."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.stub_gpu.build import build, variables, why_not
from tests.ranks import launch, start_server

needs_stub_gpu = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


class StubGpu:
    """Runs scripts in processes that take the library for a GPU, forked from a server as in `tests.ranks`."""

    def __init__(self, folder: Path) -> None:
        """The library is built in the folder."""
        self.variables = variables(build(folder)) | {"CUDA_VISIBLE_DEVICES": "0"}
        self.server = start_server(self.variables)

    def __call__(self, script: Path, *arguments: object, timeout: float = 500, **more: str) -> CompletedProcess:
        """As `launch` of one rank, with more variables of the environment."""
        given = self.variables | more
        done = launch(1, script, *arguments, timeout=timeout, server=self.server, variables=given)
        # After the stacks of a crash, faulthandler lists hundreds of modules: tests show the end of what was written.
        done.stderr = re.sub(r"\n*Extension modules: .*", "", done.stderr)
        return done
