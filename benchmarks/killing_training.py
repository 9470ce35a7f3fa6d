"""Kill a training run at random moments, start it again each time, and compare its end with an uninterrupted run's.

    python benchmarks/killing_training.py yamls/openmoji_diffusion.yaml training.duration=40ba checkpoints.every=5ba
    python benchmarks/killing_training.py RECIPE --kills 10 --ranks 2 --engines lightning
    python benchmarks/killing_training.py RECIPE --signals SIGTERM SIGUSR1

The kills are SIGKILLs of real processes from outside: of a random rank first, and of the others after it, as launchers
do. With `--signals` they are one of these signals to a random rank, drawn for each kill; the run must then have saved
each batch whose update it made, and exit with status 85. A run that ends before its kill is compared and begun anew,
until there were enough kills. Exits with status 1 unless no batch was lost after a signal, and every run that ended
has the same bits as the uninterrupted one on as many ranks: weights, averages, the optimizer's state, positions and
generators in its last checkpoint, exported files, drawn pictures, logged figures but those of clocks and memory, and
the losses of all batches, also of those that were trained twice. Checkpoints must be full ones,
`training.fsdp.checkpoints: full`.
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

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import numpy as np

from benchmarks.killing import LONGEST, fork, new_parser
from recipes.training.stop import EXIT_CODE

LOSSES = "losses.jsonl"
CLOCKS = ("memory/", "throughput/", "time/")  # logged figures that differ from run to run
PATIENCE = 30.0  # seconds that the other ranks have to end
ELSEWHERE = ("checkpoints", "config", "records", "tensorboard", LOSSES, ".")  # not compared as they are


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__, "a training run", kills=20)
    parser.add_argument("--engines", nargs="+", default=["composer", "lightning"])
    parser.add_argument("--signals", nargs="+", default=["SIGKILL"], choices=("SIGKILL", "SIGTERM", "SIGUSR1"))
    options = parser.parse_intermixed_args(arguments)
    import_slow()
    rng, same = np.random.default_rng(options.seed), True
    for engine in options.engines:
        for world in options.ranks:
            with tempfile.TemporaryDirectory(prefix="killing-") as folder:
                recipe = [*options.recipe, f"training.engine={engine}"]
                signals = [signal.Signals[name] for name in options.signals]
                report = killed_runs(recipe, Path(folder), world, options.kills, rng, signals)
            same &= not report["different"] and not report["lost"]
            found = f"not the same: {', '.join(report['different'][:5])}" if report["different"] else "the same bits"
            print(
                f"{engine}, {world} ranks: {report['kills']} kills ({report['before']} before the first checkpoint) in "
                f"{report['starts']} starts; {report['runs']} runs ended, {report['values']} values each: {found}; "
                f"{report['lost']} batches lost after a signal, the last process ended up to {report['slowest']:.1f} s "
                "after it",
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


def killed_runs(
    recipe: list[str],
    folder: Path,
    world: int,
    kills: int,
    rng: np.random.Generator,
    signals: list[signal.Signals],
) -> dict[str, Any]:
    """What became of a run that was killed so many times: kills, starts, kills before the first checkpoint, runs that
    ended, values of each, the names of values that are different, batches that were lost after a signal that asks to
    stop, and the longest time in seconds from a signal to the end of the last process.

    Args:
        recipe: YAML of a training run, and overrides of its keys.
        folder: for the runs.
        world: number of ranks.
        kills: in all runs together.
        rng: draws the moments, the ranks and the signals.
        signals: each kill is by one of these.

    Raises:
        RuntimeError: a start that was not killed ended with an error, or not at all.
    """
    log, began = folder / "log.txt", time.monotonic()
    start([*recipe, f"output={folder}/whole"], folder / "whole", world, log)
    seconds, whole = time.monotonic() - began, digests(folder / "whole")
    report = {"kills": 0, "before": 0, "starts": 0, "runs": 0, "values": len(whole), "different": []}
    report |= {"lost": 0, "slowest": 0.0}
    out = folder / "killed"
    while True:
        last = report["kills"] == kills
        moment = None if last else rng.uniform(0.0, seconds)
        number = signals[rng.integers(len(signals))]
        batches = len(losses_of(out))
        took = start([*recipe, f"output={out}"], out, world, log, moment, int(rng.integers(world)), number)
        report["starts"] += 1
        if took is not None:
            report["kills"] += 1
            report["before"] += not any((out / "checkpoints").glob("latest*"))
            if number != signal.SIGKILL:
                report["slowest"] = max(report["slowest"], took)
                report["lost"] += lost_batches(out, batches)
        else:
            found = digests(out)
            report["runs"] += 1
            report["different"] += sorted(n for n in whole.keys() | found.keys() if whole.get(n) != found.get(n))
            shutil.rmtree(out)
            if last:
                return report


def lost_batches(out: Path, before: int) -> int:
    """How many batches of the last start are not in the newest checkpoint.

    Args:
        out: folder of the run.
        before: number of losses that starts before it have written down.
    """
    from recipes.training.checkpoint_names import batch_of, newest_of_all

    trained = losses_of(out)[before:]
    newest = newest_of_all(out / "checkpoints")
    return max(0, trained[-1][0] - (batch_of(newest.name) if newest else 0)) if trained else 0


def start(
    arguments: list[str],
    out: Path,
    world: int,
    log: Path,
    moment: float | None = None,
    victim: int = 0,
    number: signal.Signals = signal.SIGKILL,
) -> float | None:
    """One start of the run, in `world` processes.

    Args:
        arguments: of recipes/train.py.
        out: folder of the run.
        world: number of processes.
        log: where they print.
        moment: seconds after which it gets the signal; None: never.
        victim: the rank that gets it first.
        number: the signal. The others get SIGKILL after SIGKILL. Otherwise they get SIGTERM when one has ended, and
            SIGKILL if they have not ended 30 s later, as by launchers.

    Returns:
        Seconds from the signal to the end of the last process; None: it got none.

    Raises:
        RuntimeError: a process ended with an error, or not at all.
    """
    log.write_bytes(b"")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    left = {}
    for rank in range(world):
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        left[rank] = fork(partial(train, arguments, out), log, sizes | place if world > 1 else {})
    began, sent, first_end, now = time.monotonic(), None, None, 0.0
    while left:
        now = time.monotonic() - began
        if sent is None and victim in left and moment is not None and now > moment:
            sent = now
            if number == signal.SIGKILL:
                os.killpg(left[victim], number)
                time.sleep(0.2)  # the others go on, till they miss it
                signal_all(left, number)
                first_end = now
            else:
                os.kill(left[victim], number)
        for rank, process in list(left.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            del left[rank]
            code = os.waitstatus_to_exitcode(status)
            # Before this project's handlers are set, a signal ends a process itself, or by Composer's handler.
            expected = (0,) if sent is None else (0, EXIT_CODE, -number, 128 + number)
            # Only the first end counts: the others may fail for the lack of that process.
            if first_end is None and code not in expected:
                raise RuntimeError(f"rank {rank} ended with {code}:\n{log.read_text()[-3000:]}")
            if first_end is None and sent is not None:
                first_end = now
                signal_all(left, signal.SIGTERM)
        if first_end is not None and now > first_end + PATIENCE:
            signal_all(left, signal.SIGKILL)
        if now > LONGEST:
            signal_all(left, signal.SIGKILL)
            raise RuntimeError(f"ranks {sorted(left)} did not end:\n{log.read_text()[-3000:]}")
        time.sleep(0.005)
    return None if sent is None else now - sent


def signal_all(processes: dict[int, int], number: signal.Signals) -> None:
    """Send a signal to processes and, if it is SIGKILL, to those that they have started."""
    for process in processes.values():
        if number == signal.SIGKILL:
            os.killpg(process, number)
        else:
            os.kill(process, number)


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
    from recipes.engines.checkpoints.conversion import from_composer, read_composer
    from recipes.engines.lightning.checkpoint_format import read_file
    from recipes.training.checkpoint_names import newest_of_all

    newest = newest_of_all(out / "checkpoints")
    state = read_file(newest) if newest.suffix == ".ckpt" else from_composer(read_composer(newest))
    losses: dict[str, set[str]] = {}
    for batch, loss in losses_of(out):
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


def losses_of(out: Path) -> list[tuple[int, float]]:
    """Batches and losses that a run's starts have written down, in their order."""
    lines = (out / LOSSES).read_text().splitlines() if (out / LOSSES).exists() else []
    # A line that a kill has cut off is not whole, and its batch is trained again.
    return [tuple(json.loads(line)) for line in lines if line.startswith("[") and line.endswith("]")]


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
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:  # of a start that was not killed; it has what that printed
        sys.exit(f"killing_training: {error}")
