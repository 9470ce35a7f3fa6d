"""Run by test_stop.py in a forked process that has imported both launchers: how `composer` and `torchrun` are stopped.

argv: a folder. <folder>/report.json says for each launcher and event what it exits with (minus the signal that ended
it), what its two ranks were stopped by, and what they were told by their environment.

As one of the ranks, with the variable RANKS_FOLDER, it waits for a signal as a run does between two batches.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from recipes.training import stop

LAUNCHERS = {"composer": ["-n", "2"], "torchrun": ["--standalone", "--nproc_per_node", "2"]}
# Signals to the launcher, SIGTERM to both of its ranks, or SIGINT to all, as a terminal sends it.
EVENTS = {"composer": ("SIGTERM", "SIGINT", "rank", "Ctrl-C"), "torchrun": ("SIGTERM", "SIGUSR1", "rank", "Ctrl-C")}
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "MASTER_")  # beginnings of variables


def be_a_rank(folder: Path) -> None:
    rank = os.environ["RANK"]
    with stop.stop_signals():
        stop.begin_batches()
        told = {name: value for name, value in os.environ.items() if name.startswith(TOLD)}
        (folder / f"{rank}.started").write_text(json.dumps([os.getpid(), told]))
        while not stop.requested():
            time.sleep(0.01)
        time.sleep(0.2)  # the end of the batch, and a checkpoint
        (folder / f"{rank}.stopped").write_text(stop.caught())
        raise stop.StartAgain


def be_a_launcher(name: str, folder: Path) -> None:
    os.setpgid(0, 0)
    os.environ["RANKS_FOLDER"] = str(folder)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    sys.argv = [name, *LAUNCHERS[name], __file__]
    if name == "composer":
        from composer.cli.launcher import main
    else:
        from torch.distributed.run import main
    sys.exit(main())


def stopped(name: str, event: str, folder: Path) -> tuple[int, list[str], list[dict[str, str]]]:
    folder.mkdir()
    launcher = os.fork()
    if not launcher:
        from composer.core.engine import sigterm_handler  # which the import of Composer sets in a new process

        own = name == "composer"
        signal.signal(signal.SIGTERM, sigterm_handler if own else signal.SIG_DFL)
        signal.signal(signal.SIGINT, sigterm_handler if own else signal.default_int_handler)
        be_a_launcher(name, folder)
    started = [json.loads(text_of(folder / f"{rank}.started")) for rank in range(2)]
    if event == "rank":
        for process, _ in started:
            os.kill(process, signal.SIGTERM)
    elif event == "Ctrl-C":
        os.killpg(launcher, signal.SIGINT)
    else:
        os.kill(launcher, getattr(signal, event))
    code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    signals = [text_of(folder / f"{rank}.stopped") for rank in range(2)]
    return code, signals, [told for _, told in started]


def text_of(file: Path) -> str:
    """What a rank writes into a file, soon."""
    end = time.monotonic() + 120
    while not (file.is_file() and file.read_text()):
        assert time.monotonic() < end, f"{file} did not come"
        time.sleep(0.02)
    return file.read_text()


if __name__ == "__main__":
    if "RANKS_FOLDER" in os.environ:
        be_a_rank(Path(os.environ["RANKS_FOLDER"]))
    out = Path(sys.argv[1])
    report = {
        f"{name} {event}": stopped(name, event, out / f"{name}-{event}")
        for name, events in EVENTS.items()
        for event in events
    }
    (out / "report.json").write_text(json.dumps(report))
