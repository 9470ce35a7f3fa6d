"""Run by test_killed.py: runs that are killed by real SIGKILLs, stopped by signals, and started again each time.

argv: FOLDER RECIPE TOKENS ENCODE ENGINE...

Each start is a process of its own, or one per rank, forked from this one, which has done the slow imports. It runs
recipes/train.py. FOLDER/report.json says how each ended: [exit code or minus the signal, what it printed].

RECIPE is trained and killed on one rank; RECIPE and TOKENS are killed and go on with other numbers of ranks; and the
encode job ENCODE is killed at random (FOLDER/encode.json).
"""

import hashlib
import io
import json
import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path

import composer  # noqa: F401 - before the fork
import lightning.pytorch  # noqa: F401
import torch

import recipes.engines.composer.trainer
import recipes.engines.lightning.trainer
import recipes.exports.folder
from benchmarks.killing import fork, killed_jobs
from recipes.algorithms.resilience.guard import Guard
from recipes.algorithms.sharding.shards import own
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.engines.checkpoints import files as checkpoint_files
from recipes.train import main
from recipes.training import ranks
from tests.ranks import free_port
from tests.recipes.engines.killed_worlds import ALONE, FULL, OVERFLOWS, SIGNALS, STARTS, WORLDS


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def at_batch(batch, act):
    """Act at the end of a batch, before anything else looks at it."""
    step_end = Guard.step_end

    def patched(self, run):
        step_end(self, run)
        if run.clock.batch == batch:
            act()

    Guard.step_end = patched


def half_written(batch):
    """Be killed when half of the bytes of a batch's checkpoint are written."""
    save = torch.save
    now = []
    at_batch(batch, lambda: now.append(True))

    def patched(value, file, *arguments, **keywords):
        if not now:
            return save(value, file, *arguments, **keywords)
        whole = io.BytesIO()
        save(value, whole)
        half = whole.getvalue()[: len(whole.getvalue()) // 2]
        if hasattr(file, "write"):
            file.write(half)
            file.flush()
        else:
            Path(file).write_bytes(half)
        kill()

    torch.save = patched


def arrange(what, batch):
    """What happens to this process, and when."""
    if what == "kill":
        at_batch(batch, kill)
    elif what == "half":
        half_written(batch)
    elif what == "unlinked":
        at_batch(batch, lambda: setattr(checkpoint_files, "point_to", lambda *_: kill()))
    elif what == "full":  # no file of a checkpoint is as small
        at_batch(batch, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15)))
    elif what == "export":
        recipes.exports.folder.write_json = lambda *_, **__: kill()
    elif what != "none":
        at_batch(batch, lambda: os.kill(os.getpid(), getattr(signal, what)))


def record_samples(file, number):
    """Write down a hash of each sample of each batch, whichever rank trains on it, and which start of the run it is."""
    batch_start = Guard.batch_start

    def patched(self, run):
        batch_start(self, run)
        rows = zip(*(tensor.tolist() for tensor in run.batch.values()), strict=True)
        hashes = [hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest() for row in rows]
        with open(file, "a") as lines:
            lines.write(json.dumps([number, run.clock.batch, hashes]) + "\n")

    Guard.batch_start = patched


def overflow():
    """In some batches, a gradient of the second scaled block is infinite on the last rank."""
    unscale = ResblockGradScaling.unscale_gradients

    def patched(self, run):
        if run.clock.batch in OVERFLOWS and ranks.rank() + 1 == ranks.world_size():
            gradients = [own(p.grad) for p in self.branches[1].parameters()]
            max(gradients, key=torch.numel).view(-1)[0] = torch.inf
        unscale(self, run)

    ResblockGradScaling.unscale_gradients = patched


def train(what, batch, arguments, samples):
    """What a forked process does."""
    arrange(what, batch)
    overflow()
    if samples is not None:
        record_samples(*samples)
    sys.argv = ["recipes/train.py", *arguments]
    main()


def start(what, batch, arguments, log, world=1, samples=None):
    """Fork, train; the exit code or minus the signal of the last rank, and what it printed.

    When it is killed, the other ranks are, too, as launchers do.
    """
    port, children = free_port(), []
    for rank in range(world):
        last = rank == world - 1
        own_log = Path(log if last else f"{log}.{rank}")
        own_log.unlink(missing_ok=True)
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place = {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run = partial(train, what if last else "none", batch, arguments, samples)
        children.append(fork(run, own_log, sizes | place if world > 1 else {}))
    code = os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1])
    for child in children[:-1]:
        if code < 0:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return code, Path(log).read_text()


def on_other_ranks(folder, recipes):
    """Runs that are killed and go on with another number of ranks, and one of each recipe that is left alone."""
    report, log = {}, f"{folder}/log.txt"
    for kind, name in ALONE.items():
        alone = [recipes[kind], *WORLDS[name][2], "training.fsdp=null", f"output={folder}/{kind}-alone"]
        report[f"{kind} alone"] = start("none", 0, alone, log, samples=(f"{folder}/{kind}-alone.jsonl", 0))
    for name, (kind, engine, overrides, worlds) in WORLDS.items():
        arguments = [recipes[kind], f"training.engine={engine}", *overrides, f"output={folder}/{name}"]
        for number, world in enumerate(worlds):
            what, batch = ("none", 0) if number + 1 == len(worlds) else ("kill", 3 + 2 * number)
            if (name, number) in FULL:
                what, batch = "full", 4
            report[f"{name} {number}"] = start(what, batch, arguments, log, world, (f"{folder}/{name}.jsonl", number))
    return report


if __name__ == "__main__":
    folder, recipe, tokens, encode, *engines = sys.argv[1:]
    report = on_other_ranks(folder, {"tokens": tokens, "scaled": tokens, "recipe": recipe})
    for engine in engines:
        arguments = [recipe, f"training.engine={engine}"]
        whole = [*arguments, f"output={folder}/{engine}-whole"]
        report[f"{engine} whole"] = start("none", 0, whole, f"{folder}/log.txt")
        for name in (text.format(signal=SIGNALS[engine]) for text in STARTS):
            what, batch = name.split()
            killed = [*arguments, f"output={folder}/{engine}-killed"]
            report[f"{engine} {name}"] = start(what, int(batch), killed, f"{folder}/log.txt")
            files = sorted(p.name for p in Path(folder, f"{engine}-killed", "checkpoints").iterdir())
            report[f"{engine} {name}"] += (files,)
    Path(folder, "report.json").write_text(json.dumps(report, indent=1))
    jobs = list(killed_jobs([encode], Path(folder), ranks=[1, 2], kills=2, seed=0))
    Path(folder, "encode.json").write_text(json.dumps(jobs))
