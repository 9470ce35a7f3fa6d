"""Run on two ranks by test_rank_curves.py: the benchmark, with its results in the folder given first."""

import itertools
import os
import sys
from pathlib import Path

from streaming.base.shared import prefix

from benchmarks import rank_curves, reporting

# As `closed_probes` in tests/conftest.py: names of shared memory that no other process of the machine takes. Both ranks
# must look in the same range, which is that of the launcher.
prefix._each_prefix_int = lambda: itertools.count(1000 * os.getppid())
reporting.RESULTS = Path(sys.argv[1])
rank_curves.main(sys.argv[2:])
