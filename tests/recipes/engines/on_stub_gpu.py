"""Run by test_on_stub_gpu.py in a process that takes the stub for a GPU: as shipped_ranks.py, on one rank."""

from benchmarks.stub_gpu.use import Counts, compute_decisions_on_host
from recipes.models.kernels import fused_norm
from tests.recipes.engines.shipped_ranks import main

fused_norm.WARM_UP, fused_norm.REPEATS = 1, 1  # which kernel is faster means nothing here

if __name__ == "__main__":
    compute_decisions_on_host()
    main(Counts())
