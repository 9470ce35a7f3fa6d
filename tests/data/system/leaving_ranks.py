"""Run on two ranks by test_process_groups.py: leaves process groups right after a collective, ten times, and ends.

argv: a folder for their stores.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from data.system.process_groups import leave


def main(folder: Path) -> None:
    for number in range(10):
        store = dist.FileStore(str(folder / str(number)), 2)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
        for group in (None, dist.new_group([0, 1])):
            told = [None, None]
            dist.all_gather_object(told, {"rank": dist.get_rank()}, group=group)
            assert told == [{"rank": 0}, {"rank": 1}]
        del group
        leave()
        assert not dist.is_initialized()
    print("left", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
