"""Run by test_on_stub_gpu.py in a process that takes the stub for a GPU: as shipped_ranks.py, on one rank."""

from benchmarks.stub_gpu.use import Counts, compute_decisions_on_host
from tests.recipes.engines.shipped_ranks import main

if __name__ == "__main__":
    compute_decisions_on_host()
    main(lambda: Counts().strays)
