"""Run on two ranks by test_rank_curves.py: the benchmark, with its results in the folder given first."""

import sys
from pathlib import Path

from benchmarks import rank_curves, reporting

reporting.RESULTS = Path(sys.argv[1])
rank_curves.main(sys.argv[2:])
