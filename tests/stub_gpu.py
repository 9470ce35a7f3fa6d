"""Processes that take the stub for a GPU (see `benchmarks.stub_gpu`)."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.stub_gpu.build import build, variables, why_not
from tests.ranks import launch, start_server

needs_stub_gpu = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


class StubGpu:
    """Runs scripts in processes that take the library for GPUs, forked from a server as in `tests.ranks`."""

    def __init__(self, folder: Path) -> None:
        """The library is built in the folder."""
        self.variables = variables(build(folder))
        self.server = start_server(self.variables | _devices(1))

    def __call__(
        self, script: Path, *arguments: object, ranks: int = 1, timeout: float = 500, **more: str
    ) -> CompletedProcess:
        """As `launch`, with a GPU per rank and more variables of the environment."""
        given = self.variables | _devices(ranks) | more
        done = launch(ranks, script, *arguments, timeout=timeout, server=self.server, variables=given)
        # After the stacks of a crash, faulthandler lists hundreds of modules: tests show the end of what was written.
        done.stderr = re.sub(r"\n*Extension modules: .*", "", done.stderr)
        return done


def _devices(count: int) -> dict[str, str]:
    return {"STUB_GPUS": str(count), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
