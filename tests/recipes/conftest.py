"""One launch of two ranks for the checks of several files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.config.recipe import to_yaml

ROOT = Path(__file__).resolve().parents[2]


class TwoRanks:
    """The outcome of a launch; calling it with a check's name fails if the check did, else gives the check's folder."""

    def __init__(self, folder, reports, output):
        self.folder, self.reports, self.output = folder, reports, output

    def __call__(self, check):
        results = [report.get(check, "it was not reached:\n" + self.output) for report in self.reports]
        failed = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(results) if text != "passed")
        if failed:
            pytest.fail(failed, pytrace=False)
        return self.folder / re.sub(r"\W+", "-", check)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, small_recipe):
    """`lever_ranks` in one launch, for averages, microbatches and sharding."""
    from tests.recipes.algorithms.sharding.fsdp_ranks import RUN

    folder = tmp_path_factory.mktemp("two_ranks")
    (folder / "recipe.yaml").write_text(to_yaml(small_recipe(folder / "run", *RUN)))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_WORLD_SIZE")
    # A Trainer in this process has set some of them.
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).parent / "algorithms" / "lever_ranks.py"
    arguments = [str(folder / "recipe.yaml"), str(folder), str(folder / "report")]
    done = subprocess.run(
        [*command, str(script), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=570
    )
    reports = [
        json.loads(file.read_text()) if file.is_file() else {}
        for file in (folder / f"report.{rank}.json" for rank in range(2))
    ]
    return TwoRanks(folder, reports, done.stdout[-3000:] + done.stderr[-6000:])
