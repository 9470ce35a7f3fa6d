"""Train a recipe for a set time, and fail if the memory of its processes or the number of their files goes on growing.

    python benchmarks/soak.py yamls/openmoji_diffusion.yaml --minutes 60
    composer -n 8 benchmarks/soak.py yamls/sd2_base.yaml training.global_batch=256 --minutes 60 --limit 64

Each rank adds up the memory of its own process and of its data workers, shared pages divided among those that share
them, and that of its GPU where there is one. The first third of the time is warm-up; the median of the last third may
be at most `--limit` MiB above that of the second, and the number of open files of the rank's process at most
`--files`. Each line is one rank's and one kind of memory, or its files. Exits with status 1 if one has grown.
Validation and loggers are as in the recipe, but for wandb. Checkpoints are saved every 100 batches, or as
`checkpoints.every` says on the command line, and two are kept. Exports are off, and what is written goes into a
temporary folder.
"""

import argparse
import importlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import torch

from recipes.config.command_line import read_command_line, user_errors
from recipes.config.recipe import Recipe
from recipes.training.callback import Callback
from recipes.training.ranks import all_reduce, rank

MIB = 1 << 20
clock = time.monotonic
DEFAULTS = ("checkpoints.every=100ba",)  # of what the command line may say otherwise
OVERRIDES = ("checkpoints.keep=2", "checkpoints.bucket=null", "training.duration=1000000000ba")
FILES = "open files"
NOTES = 300  # of the memory, in a run


class TimeIsUp(Exception):
    """Ends a run that has no length."""


class MemoryOverTime(Callback):
    """Notes the memory of this rank's processes and its open files at the ends of batches, and ends the run when its
    time is up.

    Attributes:
        notes: name of a kind of memory -> (seconds since the first batch, bytes) of each note; of FILES, their number.
        batches: that were trained.
    """

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: to train for, from the end of the first batch on.
        """
        self.seconds = seconds
        self.pause = seconds / NOTES
        self.notes: dict[str, list[tuple[float, int]]] = {}
        self.batches = 0
        self._began: float | None = None
        self._noted = -1.0

    def step_end(self, run) -> None:
        """Called after each batch.

        Raises:
            TimeIsUp: on all ranks at once.
        """
        now = clock()
        self._began = now if self._began is None else self._began
        passed = now - self._began
        self.batches += 1
        if passed - self._noted >= self.pause:
            self._noted = passed
            files = len(os.listdir("/proc/self/fd"))
            for name, size in (memory(run) | {FILES: files}).items():
                self.notes.setdefault(name, []).append((passed, size))
        up = torch.tensor([int(passed >= self.seconds)], device=run.device)
        all_reduce(up, "MAX")
        if up.item():
            raise TimeIsUp


def memory(run) -> dict[str, int]:
    """Bytes of this process, of its data workers, and of its GPU's tensors."""
    workers = [worker.pid for worker in multiprocessing.active_children()]
    found = {"trainer": bytes_of(os.getpid()), "workers": sum(map(bytes_of, workers))}
    return found | ({"GPU": torch.cuda.memory_reserved()} if run.on_gpu else {})


def bytes_of(process: int) -> int:
    """Bytes of memory that a process has, or 0 if it has ended; of blocks that n processes share, an n-th.

    Pages that a worker still shares with the trainer, of which it is a copy, count for both in full: they become two as
    soon as one of them writes there, so that each process's part grows for hours although nothing is allocated. Pages
    of files, which are mostly code, are left out.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Anonymous:", "Pss_Shmem:")))


def growth(notes: list[tuple[float, int]]) -> float:
    """By how many bytes, or files, the median of the last third of the time is above that of the second third.

    Raises:
        ValueError: too few notes, because the time is too short or the batches are too long.
    """
    end = notes[-1][0] if notes else 0.0
    second = [size for seconds, size in notes if end / 3 <= seconds < 2 * end / 3]
    third = [size for seconds, size in notes if seconds >= 2 * end / 3]
    if not second or not third:
        raise ValueError(f"soak: only {len(notes)} notes in {end:.0f} s; give more --minutes")
    return statistics.median(third) - statistics.median(second)


def soak(recipe: Recipe, seconds: float) -> MemoryOverTime:
    """Train a recipe for so many seconds. It has no length of its own."""
    trainers = importlib.import_module(f"recipes.engines.{recipe.training.engine}.trainer")
    notes = MemoryOverTime(seconds)
    trainer = trainers.build_trainer(recipe, lambda parts: parts.callbacks.update(soak=notes))
    try:
        trainer.fit()
    except TimeIsUp:
        trainer.close()
    return notes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=64.0)
    parser.add_argument("--files", type=float, default=8.0)
    options, rest = parser.parse_known_args(arguments)
    grown = False
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        if rest and rest[0] not in ("-h", "--help"):
            rest = [rest[0], *DEFAULTS, *rest[1:], *OVERRIDES, f"output={folder}"]
        recipe: Recipe = read_command_line(rest, Recipe, __doc__).config
        recipe.callbacks.pop("export", None)
        recipe.loggers = {label: logger for label, logger in recipe.loggers.items() if logger.name != "wandb"}
        with user_errors():
            found = soak(recipe, 60 * options.minutes)
        for name, notes in found.notes.items():
            unit, limit, word = (1, options.files, "") if name == FILES else (MIB, options.limit, " MiB")
            change = growth(notes) / unit
            grown |= change > limit
            print(
                f"rank {rank()}: {name}: {notes[-1][1] / unit:,.0f}{word} after {found.batches:,} batches in "
                f"{notes[-1][0] / 60:.1f} min, {change:+.1f}{word} from the second third to the last",
                flush=True,
            )
    return int(grown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
