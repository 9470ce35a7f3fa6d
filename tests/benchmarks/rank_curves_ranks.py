"""Run on two ranks by test_rank_curves.py, as imports take so long: what `overhead.py` reads of a recipe's data, and
rank_curves.py.

argv: the folder of results, YAML of the recipe, and the arguments of rank_curves.py.
"""

import json
import sys
from pathlib import Path

from composer.utils import dist

from benchmarks import overhead, rank_curves
from benchmarks.common import reporting
from recipes.config.recipe import Recipe, load_config

results = Path(sys.argv[1])
dist.initialize_dist("cpu")
samples = overhead.in_memory(load_config(sys.argv[2], [], Recipe))
found = [str(sample["mean"].flatten()[:16].tolist()) for sample in samples]
results.mkdir(exist_ok=True)
(results / f"in_memory-{dist.get_global_rank()}.json").write_text(json.dumps(found))
reporting.RESULTS = results
rank_curves.main(sys.argv[3:])
