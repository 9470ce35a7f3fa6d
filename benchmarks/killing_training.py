"""Kill a training run at random moments, start it again each time, and compare its end with an uninterrupted run's.

    python benchmarks/killing_training.py yamls/openmoji_diffusion.yaml training.duration=40ba checkpoints.every=5ba
    python benchmarks/killing_training.py RECIPE --kills 10 --ranks 2 --engines lightning

The kills are SIGKILLs of real processes from outside: of a random rank first, and of the others after it, as launchers
do. A run that ends before its kill is compared and begun anew, until there were enough kills. Exits with status 1
unless every run that ended has the same bits as the uninterrupted one on as many ranks: weights, averages, the
optimizer's state, positions and generators in its last checkpoint, exported files, drawn pictures, logged figures but
those of clocks and memory, and the losses of all batches, also of those that were trained twice. Checkpoints must be
full ones, `training.fsdp.checkpoints: full`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np

from benchmarks.killing import LONGEST, fork, new_parser

LOSSES = "losses.jsonl"
CLOCKS = ("memory/", "throughput/", "time/")  # logged figures that differ from run to run
ELSEWHERE = ("checkpoints", "config", "records", "tensorboard", LOSSES, ".")  # not compared as they are


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__, "a training run", kills=20)
    parser.add_argument("--engines", nargs="+", default=["composer", "lightning"])
    options = parser.parse_intermixed_args(arguments)
    import_slow()
    rng, same = np.random.default_rng(options.seed), True
    for engine in options.engines:
        for world in options.ranks:
            with tempfile.TemporaryDirectory(prefix="killing-") as folder:
                recipe = [*options.recipe, f"training.engine={engine}"]
                report = killed_runs(recipe, Path(folder), world, options.kills, rng)
            same &= not report["different"]
            found = f"not the same: {', '.join(report['different'][:5])}" if report["different"] else "the same bits"
            print(
                f"{engine}, {world} ranks: {report['kills']} kills ({report['before']} before the first checkpoint) in "
                f"{report['starts']} starts; {report['runs']} runs ended, {report['values']} values each: {found}",
                flush=True,
            )
    return 0 if same else 1


def import_slow() -> None:
    """Import what runs import, before processes are forked that do."""
    import composer
    import lightning.pytorch

    import recipes.engines.composer.trainer
    import recipes.engines.lightning.trainer  # noqa: F401

    assert composer.Trainer and lightning.pytorch.Trainer


def killed_runs(recipe: list[str], folder: Path, world: int, kills: int, rng: np.random.Generator) -> dict[str, Any]:
    """What became of a run that was killed so many times: kills, starts, kills before the first checkpoint, runs that
    ended, values of each, and the names of values that are different.

    Args:
        recipe: YAML of a training run, and overrides of its keys.
        folder: for the runs.
        world: number of ranks.
        kills: in all runs together.
        rng: draws the moments and the ranks.

    Raises:
        RuntimeError: a start that was not killed ended with an error, or not at all.
    """
    log, began = folder / "log.txt", time.monotonic()
    start([*recipe, f"output={folder}/whole"], folder / "whole", world, log)
    seconds, whole = time.monotonic() - began, digests(folder / "whole")
    report = {"kills": 0, "before": 0, "starts": 0, "runs": 0, "values": len(whole), "different": []}
    out = folder / "killed"
    while True:
        last = report["kills"] == kills
        moment = None if last else rng.uniform(0.0, seconds)
        killed = start([*recipe, f"output={out}"], out, world, log, moment, int(rng.integers(world)))
        report["starts"] += 1
        report["kills"] += killed
        report["before"] += killed and not any((out / "checkpoints").glob("latest*"))
        if not killed:
            found = digests(out)
            report["runs"] += 1
            report["different"] += sorted(n for n in whole.keys() | found.keys() if whole.get(n) != found.get(n))
            shutil.rmtree(out)
            if last:
                return report


def start(arguments: list[str], out: Path, world: int, log: Path, moment: float | None = None, victim: int = 0) -> bool:
    """One start of the run, in `world` processes; returns whether it was killed.

    Args:
        arguments: of recipes/train.py.
        out: folder of the run.
        world: number of processes.
        log: where they print.
        moment: seconds after which it is killed; None: never.
        victim: the rank that is killed first.

    Raises:
        RuntimeError: a process that was not killed ended with an error, or not at all.
    """
    log.write_bytes(b"")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    left = {}
    for rank in range(world):
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        left[rank] = fork(partial(train, arguments, out), log, sizes | place if world > 1 else {})
    began, killed = time.monotonic(), False
    while left:
        now = time.monotonic() - began
        if not killed and victim in left and moment is not None and now > moment:
            os.killpg(left[victim], signal.SIGKILL)
            killed = True
            time.sleep(0.2)  # the others go on, till they miss it
            for process in left.values():
                os.killpg(process, signal.SIGKILL)
        for rank, process in list(left.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del left[rank]
                if status and not killed:
                    code = os.waitstatus_to_exitcode(status)
                    raise RuntimeError(f"rank {rank} ended with {code}:\n{log.read_text()[-3000:]}")
        if now > LONGEST:
            for process in left.values():
                os.killpg(process, signal.SIGKILL)
            raise RuntimeError(f"ranks {sorted(left)} did not end:\n{log.read_text()[-3000:]}")
        time.sleep(0.005)
    return killed


def train(arguments: list[str], out: Path) -> None:
    """The run itself, in a process of its own, which also writes down the losses."""
    from recipes.algorithms.resilience.guard import Guard
    from recipes.train import main
    from recipes.training.ranks import is_first_rank

    step_end = Guard.step_end

    def patched(self: Guard, run: Any) -> None:
        step_end(self, run)
        if is_first_rank():
            with open(out / LOSSES, "a") as lines:
                lines.write(json.dumps([run.clock.batch, run.loss]) + "\n")

    Guard.step_end = patched
    sys.argv = ["recipes/train.py", *arguments]
    main()


def digests(out: Path) -> dict[str, str]:
    """A hash of each value in the last checkpoint of a run, of each exported file, picture and logged curve, and of all
    losses of each batch."""
    from recipes.comparison.events import read_curves
    from recipes.engines.conversion import from_composer, read_composer
    from recipes.engines.kinds import newest_of_all
    from recipes.engines.lightning.checkpoint_format import read_file

    newest = newest_of_all(out / "checkpoints")
    state = read_file(newest) if newest.suffix == ".ckpt" else from_composer(read_composer(newest))
    losses: dict[str, set[str]] = {}
    for line in (out / LOSSES).read_text().splitlines():
        # A line that a kill has cut off is not whole, and its batch is trained again.
        if line.startswith("[") and line.endswith("]"):
            batch, loss = json.loads(line)
            losses.setdefault(f"loss of batch {batch}", set()).add(float(loss).hex())
    found = {name: ", ".join(sorted(values)) for name, values in losses.items()}
    paths = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    files = {name: hashed(path.read_bytes()) for name, path in paths.items() if not name.startswith(ELSEWHERE)}
    curves = {
        f"curve {name}": hashed(curve.batches.tobytes() + curve.values.tobytes())
        for name, curve in read_curves(out / "tensorboard").items()
        if not name.startswith(CLOCKS)
    }
    return found | files | curves | {name: hashed(value) for name, value in flat(state)}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested values, by their full names."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            yield from flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def hashed(value: Any) -> str:
    """A hash of the bits of a tensor, or of another value."""
    import torch

    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        value = bits.numpy().tobytes() + repr((value.dtype, tuple(value.shape))).encode()
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
