"""Run on two ranks by `lever_ranks`: what ranks tell each other, ranks that wait for each other, and what the watchdog
says of those that do."""

import errno
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from callbacks import fid
from callbacks.export import Export
from data.loading import Loading
from data.sources.base import Sample
from data.system.errors import Outage
from data.system.files import write_text
from recipes.engines import resuming, shared_folder
from recipes.engines.checkpoints import checksums
from recipes.engines.checkpoints import copies as checkpoint_copies
from recipes.engines.checkpoints import fetched as fetched_checkpoints
from recipes.engines.checkpoints import files as checkpoint_files
from recipes.engines.checkpoints.fetched import fetched
from recipes.engines.checkpoints.files import CheckpointFiles
from recipes.engines.checkpoints.own_load_plan import OwnLoadPlan
from recipes.engines.checkpoints.save_planner import SavePlanner
from recipes.engines.generators import generator_states, restore_generators, seed_all, set_apart
from recipes.engines.resuming import prepare_folder
from recipes.models.task import Task
from recipes.scoring.extractors import Features
from recipes.training import ranks
from recipes.training.checkpoint_names import KINDS
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
        self.address = address

    def check_writable(self, keep):
        pass

    def latest(self):
        assert dist.get_rank() == 0
        until(self.said.is_file)
        assert self.said.read_text() == "it asks"
        if self.refuses:
            raise Outage("s3://sets/run/latest.json: cannot be read (no answer)")

    def fetch(self, name, path):
        self.latest()


class Copying(SlowBucket):
    """In place of the process that copies."""

    def start(self):
        pass

    def do(self, task):
        self.latest()

    def end(self):
        pass


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
    checkpoints = SimpleNamespace(bucket="s3://sets/run", resumes=True, save=True, keep=1)
    recipe = SimpleNamespace(checkpoints=checkpoints, output=str(folder))
    (folder / "ep0-ba9").touch()
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint_copies, fetched_checkpoints, resuming):
            patch.setattr(module, "Bucket", SlowBucket)
        patch.setattr(checkpoint_copies, "HelperProcess", Copying)
        for name in ("barrier", "all_reduce", "broadcast_object_list"):
            patch.setattr(dist, name, tells(getattr(dist, name), f"it waits in {name}"))
        patch.setattr(ranks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=tells(time.sleep, "it asks")))
        files = CheckpointFiles(folder, KINDS["lightning"], keep=1, bucket="s3://sets/run")

        def copy():
            said = SlowBucket.said
            if dist.get_rank() == 1:
                SlowBucket.said = folder  # it has said something, as the first rank does not wait here
            files.newest_is(folder / "ep0-ba9", 9)
            SlowBucket.said = said
            files.finish()

        waits = {
            "fetch": lambda: prepare_folder(recipe, "lightning"),
            "copy": copy,
            "load": lambda: fetched("s3://sets/run/ep0-ba9", folder),
        }
        refusals = dict.fromkeys(waits, "^s3://sets/run/latest.json: cannot be read .no answer.")
        refusals["copy"] = "^checkpoints.bucket: ep0-ba9 could not be copied "  # why may have been said when it failed
        for refuses in (False, True):
            patch.setattr(SlowBucket, "refuses", refuses)
            for name, wait in waits.items():
                patch.setattr(SlowBucket, "said", folder / f"{name}-{refuses}")
                if refuses:
                    with pytest.raises(Outage, match=refusals[name]):  # not the ValueError of a mistake
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
        Levers([]).call("average_gradients" if rank == 0 else "before_data", FakeRun().at(7))
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


def a_folder_of_each_machine(folder):
    """All ranks say that they could not resume, and a folder that all see is left as it was."""
    checkpoints = SimpleNamespace(bucket=None, resumes=True, save=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_folder, "PATIENCE", 0)
        for own, save in (("both", True), (str(dist.get_rank()), False)):
            checkpoints.save = save
            prepare_folder(SimpleNamespace(checkpoints=checkpoints, output=str(folder / own)), "lightning")
        assert not list((folder / "both").iterdir())
        checkpoints.save = True
        with pytest.raises(ValueError, match=f"^output: .* cannot see .*/{dist.get_rank()} of .*; give a folder on a"):
            prepare_folder(SimpleNamespace(checkpoints=checkpoints, output=str(folder / own)), "lightning")


@contextmanager
def outside_of_collectives(said):
    """Inside, the second rank says in a file that it waits for the first one outside of collectives. Gives a function
    that waits for that on the first rank, as slow work would."""

    def says(seconds):
        said.touch()
        time.sleep(seconds)

    def work(*arguments):
        assert dist.get_rank() == 0
        said.unlink(missing_ok=True)
        until(said.is_file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=says))
        yield work
    dist.barrier()


@contextmanager
def slow_disk(said):
    """Inside, the first rank's disk takes longer than a collective may, when a file is written, and later."""
    to_disk, slow = checkpoint_files.to_disk, SimpleNamespace(save=lambda *values: work() or torch.save(*values))
    with outside_of_collectives(said) as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "torch", slow)
        patch.setattr(checkpoint_files, "to_disk", lambda path: work() or to_disk(path))
        yield


def slow_checkpoints_of_lightning(folder):
    """No collective waits for what the first rank alone writes, and synchronises with its disk."""
    from recipes.config.recipe import FSDP
    from tests.recipes.engines.lightning.test_checkpoints import new_checkpoints, save_at

    for name, fsdp in (("full", None), ("sharded", FSDP(checkpoints="sharded"))):
        checkpoints, run, _ = new_checkpoints(folder / name, fsdp=fsdp)
        with slow_disk(folder / f"said-{name}"):
            save_at(checkpoints, run, 1)
        assert (folder / name / "checkpoints" / "latest").exists()


def saver_of_composer(folder, sharded):
    """A saver of checkpoints, and a state as far as it reads it."""
    from composer.core import Timestamp

    from recipes.engines.composer.checkpoints import WholeCheckpoints

    state = SimpleNamespace(
        timestamp=Timestamp(batch=3),
        fsdp_sharded_state_dict_enabled=sharded,
        fsdp_config=SimpleNamespace(save_planner=None),
        device_mesh=None,
        state_dict=lambda: {f"of {dist.get_rank()}": torch.ones(3), "algorithms": []},
    )
    files = CheckpointFiles(folder / "checkpoints", KINDS["composer"], keep=1)
    return WholeCheckpoints(files, lambda state, event: True, FakeRun().at(3)), state


def a_slow_full_checkpoint_of_composer(folder):
    """As above."""
    saver, state = saver_of_composer(folder, sharded=False)
    with slow_disk(folder / "said"):
        saver.save_and_wait(state, None)
    saved = torch.load(folder / "checkpoints" / "ep0-ba3-rank0.pt", weights_only=False)
    assert list(saved["state"]) == ["of 0", "algorithms"] and len(saved["rng"]) == 2


def replicas_in_a_sharded_checkpoint(folder):
    """Of two replicas the first one writes the shards, and of two halves each rank its own."""
    names, places = ("replicate", "shard"), [Replicate(), Shard(0)]
    for shape, of_the_second in (((2, 1), []), ((1, 2), ["weight"])):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for known, placements in ((mesh, places), (mesh["shard"], places[1:])):  # with powersgd: its own replica
            planner, path = SavePlanner(), folder / f"{shape}-{known.ndim}"
            weight = distribute_tensor(torch.arange(4.0), known, placements)
            dcp.save({"weight": weight, "batch": 3}, checkpoint_id=path, planner=planner)
            assert [*planner.state_dict] == (["weight", "batch"] if dist.get_rank() == 0 else of_the_second)
            read = {"weight": torch.zeros(4), "batch": 0}
            dcp.load(read, checkpoint_id=path, planner=OwnLoadPlan())
            assert read["weight"].tolist() == [0, 1, 2, 3] and read["batch"] == 3


@contextmanager
def parts_written_by(first, other):
    """Inside, both ranks do something before they write their parts of a sharded checkpoint of Composer."""
    write = FileSystemWriter.write_data

    def slow(self, *arguments):
        (other if dist.get_rank() else first)()
        return write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", slow)
        yield


def a_full_disk_of_a_rank(folder):
    """All ranks say it in a line, whichever rank's disk is full."""

    def refuse():
        raise OSError(errno.ENOSPC, "No space left")

    saver, state = saver_of_composer(folder, sharded=True)
    for disks in ((refuse, lambda: None), (lambda: None, refuse)):
        saver.last_checkpoint_batch = None
        with parts_written_by(*disks), pytest.raises(ValueError, match="ep0-ba3 could not be written .No space left.;"):
            saver.save_and_wait(state, None)
        dist.barrier()
        assert not list((folder / "checkpoints").iterdir())
        dist.barrier()


def a_full_disk(folder):
    """What the first rank cannot write, all ranks report in the same line."""
    path = folder / "ep0-ba1.ckpt"

    def write():
        raise OSError(errno.ENOSPC, "No space left")

    with (
        pytest.raises(ValueError, match="^checkpoints: .*ep0-ba1.ckpt could not be written .No space left.; make room"),
        checkpoint_files.whole(path),
    ):
        checkpoint_files.first_rank_writes(path, write)
    assert not list(folder.iterdir())


def a_slow_export(folder):
    """No collective waits for it, at an interval and at the end. Where it fails, it fails on both ranks."""
    task = Task()
    callback = Export(task, "run", str(folder), Loading(loader=None), None, None, None, every="2ba")
    run = FakeRun(task, duration="4ba")
    with outside_of_collectives(folder / "said") as work:
        task.export = work
        callback.after_save(run.at(2))
        assert (folder / "export" / "export.json").is_file()
        callback.end(run.at(4))
        assert callback.is_complete(run.clock)

        def refuse(_):
            raise ValueError("no such layer")

        task.export = refuse
        with pytest.raises(ValueError, match="^no such layer$"):
            callback.end(run.at(4))


def a_slow_reference_of_fid(folder):
    """No collective waits while the first rank reads the pictures, and while it computes their features. What it
    refuses, both ranks do."""
    samples = [Sample(str(number), b"", str(number)) for number in range(4)]

    def grid(*arguments, prompts, **options):
        return SimpleNamespace(prompts=prompts, begin=lambda run: None)

    def looks(pictures):
        work()
        return {"features": np.zeros((len(pictures), 2), np.float32)}

    with outside_of_collectives(folder / "said") as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fid, "GRIDS", {Task: grid})
        patch.setattr(fid, "read_reference", lambda *_: work() or samples)
        patch.setattr(fid, "decoded", lambda samples, side: [np.zeros((len(samples), 8, 8, 3), np.uint8)])
        patch.setattr(fid, "build_extractor", lambda *_: Features("zeros", "none", "0", looks))
        arguments = (Task(), str(folder), Loading(loader=None, resolution=8), None, None, 1)
        callback = fid.Fid(*arguments, reference=None, images=4)
        assert callback.grid.prompts == ["0", "1", "2", "3"]
        callback.begin(FakeRun())
        assert (callback.reference is not None) == (dist.get_rank() == 0)
        with pytest.raises(ValueError, match="^fid: images: 5 wanted, and the reference has 4 captions;"):
            fid.Fid(*arguments, reference=None, images=5)


def what_they_tell_each_other(folder):
    number = dist.get_rank()
    assert (ranks.rank(), ranks.world_size(), ranks.is_first_rank()) == (number, 2, number == 0)
    for operation, wanted in {"SUM": 5.0, "MIN": 2.0, "MAX": 3.0}.items():
        tensor = torch.tensor([2.0 + number])
        ranks.all_reduce(tensor, operation)
        assert tensor.item() == wanted, operation
    assert ranks.smallest(10 - number, torch.device("cpu")) == 9
    assert ranks.from_first_rank({"rank": number}) == {"rank": 0}
    seed_all(number)
    states = generator_states()
    torch.rand(3)
    restore_generators(states)
    assert [state["torch"][0].item() for state in states] == [0, 1] and torch.initial_seed() == number
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(number)))
    for seeds, alone in (((4, 5), (True, True)), ((4, 4), (True, False))):  # the second: of a tensor parallel group
        seed_all(seeds[number])
        set_apart()
        first = torch.rand(3, generator=torch.Generator().manual_seed(seeds[number]))
        assert torch.equal(torch.rand(3), first) == alone[number], seeds


def a_failure_of_the_first_rank(folder):
    """It goes on when the other one knows: it may end then, and with it the store that has the answer."""
    wait, alone = ranks.wait, []

    def refuse():
        raise RuntimeError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(0.3)))
        patch.setattr(ranks, "wait", lambda: alone.append((folder / "gone").exists()) or wait())
        with pytest.raises(ValueError if dist.get_rank() else RuntimeError, match="^no$"):
            ranks.by_first_rank(refuse)
    (folder / "gone").touch()
    assert alone == [False]


def an_outage_of_one_rank(folder):
    """All ranks end by it: a job is not started again where one of them says that there is a mistake."""

    def ask():
        if dist.get_rank() == 1:
            raise Outage("no answer")

    with pytest.raises(Outage, match="^no answer$"):
        ranks.on_all_ranks(ask)


CHECKS = {
    "what ranks tell each other": what_they_tell_each_other,
    "a failure of the first rank": a_failure_of_the_first_rank,
    "an outage of one rank": an_outage_of_one_rank,
    "waiting: a slow bucket": a_slow_bucket,
    "waiting: a hang": a_hang,
    "waiting: a folder of each machine": a_folder_of_each_machine,
    "waiting: slow checkpoints of Lightning": slow_checkpoints_of_lightning,
    "waiting: a slow full checkpoint of Composer": a_slow_full_checkpoint_of_composer,
    "replicas in a sharded checkpoint": replicas_in_a_sharded_checkpoint,
    "waiting: a full disk": a_full_disk,
    "waiting: a full disk of a rank": a_full_disk_of_a_rank,
    "waiting: a slow export": a_slow_export,
    "waiting: a slow reference of fid": a_slow_reference_of_fid,
}
