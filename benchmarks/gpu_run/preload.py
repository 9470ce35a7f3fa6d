"""Imported once by the server process of `benchmarks/gpu.py`, so that its forks need not import anything."""

from benchmarks.gpu_run.device import failed_imports

failed_imports()  # a step that needs what is missing says so itself
