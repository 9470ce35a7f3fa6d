"""Run by test_on_stub_gpu.py and test_on_stub_gpus.py in processes that take the stub for a GPU: as shipped_ranks.py.

On several ranks, the collectives of each go to collectives.<rank> in the folder argv[1]."""

import os
import sys
from dataclasses import replace

from benchmarks.stub_gpu.use import Counts, compute_decisions_on_host, exchange_decisions_on_host
from recipes.models.kernels import fused_norm
from tests.recipes.engines.shipped_ranks import main

CHANNELS = 64  # with which the kernel of a norm is said to be faster, so that each run has both ways
fused_norm.WARM_UP, fused_norm.REPEATS = 1, 1  # which kernel is faster means nothing here


def measure_each_kind_once(measure=fused_norm.measure):
    """Norms that differ by their shapes alone are timed once: Triton compiles its kernels for each number of channels,
    which took a third of the time of networks with norms. test_compile_all.py has other shapes."""
    measured = set()

    def of_kind(case, device):
        kind = replace(case, shape=())
        if kind not in measured:
            measure(case, device)
            measured.add(kind)
        return fused_norm.Times(1.0, 2.0) if case.shape[1] == CHANNELS else fused_norm.Times(2.0, 1.0)

    fused_norm.measure = of_kind


if __name__ == "__main__":
    compute_decisions_on_host()
    measure_each_kind_once()
    if "RANK" in os.environ:
        exchange_decisions_on_host(f"{sys.argv[1]}/collectives.{os.environ['RANK']}")
    main(Counts())
