"""Run by test_forks.py in a process that takes the stub for a GPU and has imported what the server of tests does."""

import torch

from benchmarks.gpu_run.device import failed_imports
from tests.ranks import without_cuda

if __name__ == "__main__":
    with without_cuda():
        failed_imports()
    assert torch.cuda.is_available()
