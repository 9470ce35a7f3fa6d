"""Run on two ranks by the fixture `two_ranks`: the checks of several files in one launch, as imports take so long.

argv: a folder to work in, with unet.yaml and runs.yaml, small recipes; and a file for the report of each rank, by the
name of a check.
"""

import json
import os
import re
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from recipes.checking.links import bandwidth, clocks
from recipes.planning.hardware.calibration import links
from tests.callbacks import export_ranks, grid_ranks
from tests.recipes.algorithms import muon_ranks
from tests.recipes.algorithms.averaging import ema_ranks
from tests.recipes.algorithms.gradients import all_reduce_ranks
from tests.recipes.algorithms.microbatch import microbatch_ranks
from tests.recipes.algorithms.resilience import guard_ranks
from tests.recipes.algorithms.sharding import first_rank_ranks, fsdp_ranks
from tests.recipes.algorithms.sixteen_bit import scaling_ranks
from tests.recipes.engines import figure_ranks
from tests.recipes.training import waiting_ranks


def folder_name(check: str) -> str:
    return re.sub(r"\W+", "-", check)


def check_links(folder: Path) -> None:
    device = torch.device("cpu")
    assert [clocks(device).level, bandwidth(device).level] == ["ok", "ok"]
    within, between = links(device, 2, 2)
    assert within > 0 and between is None
    within, between = links(device, 2, 1)  # as if each rank were a machine
    assert within is None and between > 0


def main(folder: Path, report: Path) -> None:
    os.environ.setdefault("NODE_RANK", "0")  # Composer asks for it
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    checks = ema_ranks.CHECKS | microbatch_ranks.CHECKS | scaling_ranks.CHECKS | fsdp_ranks.checks(folder)
    checks |= guard_ranks.CHECKS | waiting_ranks.CHECKS | figure_ranks.CHECKS | grid_ranks.CHECKS
    checks |= export_ranks.CHECKS | muon_ranks.CHECKS
    checks |= all_reduce_ranks.CHECKS | first_rank_ranks.checks(folder) | {"links": check_links}
    results = {}
    for name, check in checks.items():
        work = folder / folder_name(name)
        work.mkdir(exist_ok=True)
        try:
            check(work)
            results[name] = "passed"
        except BaseException:
            results[name] = traceback.format_exc()
        report.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(results))
        if results[name] != "passed":  # the other rank may wait for this one: both are ended
            os._exit(1)
        dist.barrier()
    os._exit(0)  # without waiting for Composer's threads


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
