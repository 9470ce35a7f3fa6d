"""Run on two ranks by `lever_ranks`: ranks that wait for each other, and what the watchdog says of those that do."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from data.files import write_text
from recipes.engines import bucket, checkpoint_files, resuming
from recipes.engines.bucket import fetched
from recipes.engines.checkpoint_files import CheckpointFiles
from recipes.engines.kinds import KINDS
from recipes.engines.resuming import prepare_folder
from recipes.training import ranks
from recipes.training.levers import Levers
from recipes.training.watchdog import watched
from tests.recipes.training.fake_run import FakeRun


def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


class SlowBucket:
    """A store that answers when the other rank has begun to wait, and refuses where it is asked to.

    Attributes:
        said: file in which the other rank says how it waits: within a collective, which has a time limit, or not.
    """

    refuses = False
    said = None

    def __init__(self, address):
        pass

    def pull(self, output, check=None):
        assert dist.get_rank() == 0
        until(self.said.is_file)
        assert self.said.read_text() == "it asks"
        if self.refuses:
            raise ValueError("s3://sets/run/latest.json: cannot be read (expired)")

    def push(self, path, link, keep):
        self.pull(path)

    def fetch(self, name, path):
        self.pull(path)


def tells(call, what):
    """The call, before which a rank says what it does, unless it has said something."""

    def patched(*arguments, **keywords):
        if dist.get_rank() == 1 and not SlowBucket.said.exists():
            write_text(SlowBucket.said, what)
        return call(*arguments, **keywords)

    return patched


def a_slow_bucket(folder):
    """No collective waits for it, when a checkpoint is fetched at the start, copied in the run, and named by its
    address. What it refuses reaches both ranks."""
    checkpoints = SimpleNamespace(bucket="s3://sets/run", resumes=True, keep=1)
    recipe = SimpleNamespace(checkpoints=checkpoints, output=str(folder))
    (folder / "ep0-ba9").touch()
    with pytest.MonkeyPatch.context() as patch:
        for module in (bucket, checkpoint_files, resuming):
            patch.setattr(module, "Bucket", SlowBucket)
        for name in ("barrier", "all_reduce", "broadcast_object_list"):
            patch.setattr(dist, name, tells(getattr(dist, name), f"it waits in {name}"))
        patch.setattr(ranks, "time", SimpleNamespace(sleep=tells(time.sleep, "it asks")))
        files = CheckpointFiles(folder, KINDS["lightning"], keep=1, bucket="s3://sets/run")
        waits = {
            "fetch": lambda: prepare_folder(recipe, "lightning"),
            "copy": lambda: files.newest_is(folder / "ep0-ba9", 9),
            "load": lambda: fetched("s3://sets/run/ep0-ba9", folder),
        }
        for refuses in (False, True):
            patch.setattr(SlowBucket, "refuses", refuses)
            for name, wait in waits.items():
                patch.setattr(SlowBucket, "said", folder / f"{name}-{refuses}")
                if refuses:
                    with pytest.raises(ValueError, match="^s3://sets/run/latest.json: cannot be read .expired.$"):
                        wait()
                else:
                    wait()
                    dist.all_reduce(torch.ones(1))  # of the next batch


def a_hang(folder):
    """The second rank never reaches a collective: each says what it waits in, and the first one's call is that."""
    rank, file = dist.get_rank(), folder / f"err.{dist.get_rank()}"
    kept, new = os.dup(2), os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(new, 2)
    with pytest.MonkeyPatch.context() as patch, watched(0.3, folder):
        patch.setenv("RANK", str(rank))
        Levers([]).at("average_gradients" if rank == 0 else "before_data", FakeRun().at(7))
        if rank == 1:
            both = [folder / "stacks" / f"rank-{number}.txt" for number in range(2)]
            until(lambda: all(path.is_file() for path in both))
        dist.all_reduce(torch.ones(1))
    os.dup2(kept, 2)
    os.close(new)
    (line,) = [line for line in file.read_text().splitlines() if "no progress" in line]
    moment = "average_gradients" if rank == 0 else "before_data"
    assert line.startswith(f"rank {rank}: ") and f"since {moment} after batch 7: waits in " in line, line
    assert ("distributed_c10d.py" in line and " all_reduce" in line) == (rank == 0), line


CHECKS = {"waiting: a slow bucket": a_slow_bucket, "waiting: a hang": a_hang}
