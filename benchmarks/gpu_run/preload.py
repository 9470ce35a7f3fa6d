"""Imported once by the server process of `benchmarks/gpu.py`, so that its forks need not import anything."""

import contextlib
import sys

import torch

from benchmarks.gpu_run.device import MODULES, failed_imports

for module in MODULES:
    failed_imports([module])  # a step that needs what is missing says so itself
    if torch.cuda.is_initialized():
        print(f"importing {module} has initialised CUDA, so forks of this process cannot use the GPU", file=sys.stderr)
        break

with contextlib.suppress(ImportError):
    from composer.utils.collect_env import get_cpu_model

    get_cpu_model()  # Composer's Trainer starts a process to ask for it, once per process
