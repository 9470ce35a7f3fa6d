"""Runs that are killed by real SIGKILLs, stopped by signals, and started again each time.

    python tests/recipes/engines/killed_runs.py FOLDER RECIPE ENGINE...

Each start is a process of its own, forked from this one, which has done the slow imports. It runs recipes/train.py.
FOLDER/report.json says how each ended: [exit code or minus the signal, what it printed].
"""

import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import composer  # noqa: F401 - before the fork
import lightning.pytorch  # noqa: F401
import torch

import callbacks.export
import recipes.engines.composer.trainer
import recipes.engines.lightning.trainer  # noqa: F401
from recipes.algorithms.resilience.guard import Guard
from recipes.engines import checkpoint_files
from recipes.train import main

STARTS = ["half 4", "unlinked 4", "{signal} 4", "export 7", "none 0"]
SIGNALS = {"composer": "SIGTERM", "lightning": "SIGUSR1"}


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
    elif what == "export":
        callbacks.export.write_json = lambda *_, **__: kill()
    elif what != "none":
        at_batch(batch, lambda: os.kill(os.getpid(), getattr(signal, what)))


def start(what, batch, arguments, log):
    """Fork, train; the child's exit code or minus its signal, and what it printed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            arrange(what, batch)
            sys.argv = ["recipes/train.py", *arguments]
            main()
            code = 0
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), Path(log).read_text()


if __name__ == "__main__":
    folder, recipe, *engines = sys.argv[1:]
    report = {}
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
