"""Imported once by the server process of `benchmarks/gpu.py`, so that its forks need not import anything."""

import sys

# timm imports wandb where it is installed. No step needs it, and after so many other modules it takes a minute, because
# pydantic looks through all of them for the source of each of its classes.
sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]

import torch

from benchmarks.gpu_run.device import MODULES, failed_imports

for module in MODULES:
    failed_imports([module])  # a step that needs what is missing says so itself
    if torch.cuda.is_initialized():
        print(f"importing {module} has initialised CUDA, so forks of this process cannot use the GPU", file=sys.stderr)
        break
