"""Run by test_on_stub_gpu.py and test_on_stub_gpus.py in processes that take the stub for a GPU: as shipped_ranks.py.

On several ranks, the collectives of each go to collectives.<rank> in the folder argv[1]."""

import os
import sys

from benchmarks.stub_gpu.use import Counts, compute_decisions_on_host, exchange_decisions_on_host
from recipes.models.kernels import fused_norm
from tests.recipes.engines.shipped_ranks import main

fused_norm.WARM_UP, fused_norm.REPEATS = 1, 1  # which kernel is faster means nothing here

if __name__ == "__main__":
    compute_decisions_on_host()
    if "RANK" in os.environ:
        exchange_decisions_on_host(f"{sys.argv[1]}/collectives.{os.environ['RANK']}")
    main(Counts())
