"""Processes that fork others start no CUDA, or none of their forks could use the GPU."""

from pathlib import Path

from benchmarks.gpu_run.forks import WITHOUT_CUDA
from tests.stub_gpu import needs_stub_gpu


@needs_stub_gpu
def test_neither_server_starts_cuda(stub_gpu):
    """Neither what the server of tests imports, which looks itself, nor what that of `gpu.py` imports after it."""
    done = stub_gpu(Path(__file__).with_name("imports_on_stub_gpu.py"), **WITHOUT_CUDA)
    assert done.returncode == 0, done.stderr[-3000:]
