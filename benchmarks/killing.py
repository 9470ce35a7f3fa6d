"""Kill an encode job at random moments, start it again each time, and compare its end with an uninterrupted job's.

    python benchmarks/killing.py yamls/openmoji_encode.yaml                              # 50 kills on 1 and on 2 ranks
    python benchmarks/killing.py yamls/openmoji_encode.yaml workers=0 --kills 10 --ranks 2
    python benchmarks/killing.py yamls/openmoji_encode.yaml --ranks 1 2 3 5 --changing   # drawn anew at each start

The kills are SIGKILLs of real processes, of one rank or of all of them and their decoding processes. A job that ends
before its kill is compared and begun anew, until there were enough kills. Exits with status 1 unless every job that
ended has the same files as the uninterrupted one, byte by byte, but for the seconds that a shard took.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads

if __name__ == "__main__":
    set_default_threads()  # before torch is imported

import numpy as np

from benchmarks.common.options import positive

LONGEST = 600.0  # seconds after which a start that does not end is an error


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__, "an encode job", kills=50)
    parser.add_argument("--changing", action="store_true", help="draw the number of ranks anew at each start")
    options = parser.parse_intermixed_args(arguments)
    ranks = [options.ranks] if options.changing else options.ranks
    same = True
    with tempfile.TemporaryDirectory(prefix="killing-") as folder:
        for report in killed_jobs(options.recipe, Path(folder), ranks, options.kills, options.seed):
            same &= not report["different"]
            found = f"not the same: {', '.join(report['different'][:5])}" if report["different"] else "the same bytes"
            print(
                f"{report['kills']} kills on {report['ranks']} ranks in {report['starts']} starts; "
                f"{report['jobs']} jobs ended, {report['files']} files each: {found}",
                flush=True,
            )
    return 0 if same else 1


def new_parser(description: str, what: str, kills: int) -> argparse.ArgumentParser:
    """The options of a command that kills something: a recipe, numbers of kills and ranks, and a seed.

    Args:
        description: of the command.
        what: the recipe is one of.
        kills: how many there are by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", help=f"YAML of {what}, and overrides of its keys")
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    return parser


def killed_jobs(recipe: list[str], folder: Path, ranks: list[int] | list[list[int]], kills: int, seed: int):
    """Yields a report for each number of ranks: kills, starts, jobs, files, and the names of files that are different.

    Args:
        recipe: YAML of an encode job, and overrides of its keys.
        folder: for the sets, which are removed.
        ranks: numbers of processes, or lists of numbers one of which is drawn at each start.
        kills: for each of them.
        seed: of the moments.

    Raises:
        RuntimeError: a start that was not killed ended with an error, or not at all.
    """
    import_slow()
    rng = np.random.default_rng(seed)
    began = time.monotonic()
    start([*recipe, f"out={folder}/whole"], 1, folder / "log.txt")
    seconds = time.monotonic() - began
    whole = digests(folder / "whole")
    for world in ranks:
        report = {"kills": 0, "ranks": world, "starts": 0, "jobs": 0, "files": len(whole), "different": []}
        out = folder / "killed"
        while True:
            last = report["kills"] == kills
            now = int(rng.choice(world)) if isinstance(world, list) else world
            victims = rng.permutation(now)[: rng.integers(1, now + 1)].tolist()
            moment = None if last else rng.uniform(0.0, seconds)
            killed = start([*recipe, f"out={out}"], now, folder / "log.txt", moment, victims)
            report["kills"] += killed
            report["starts"] += 1
            if not killed:
                found = digests(out)
                report["jobs"] += 1
                report["different"] += sorted(n for n in whole.keys() | found.keys() if whole.get(n) != found.get(n))
                shutil.rmtree(out)
                if last:
                    break
        yield report


def import_slow() -> None:
    """Import what encode jobs import, before processes are forked that do."""
    import diffusers.models

    import data.tokenizers.clip_library
    import precompute.encode
    import precompute.encoding.job

    assert data.tokenizers.clip_library.open_clip and diffusers.models.AutoencoderKL and precompute.encode.main


def start(arguments: list[str], world: int, log: Path, moment: float | None = None, victims: list[int] = ()) -> bool:
    """One start of the job, in `world` processes.

    Args:
        arguments: of precompute/encode.py.
        world: number of processes.
        log: where they print.
        moment: seconds after which some are killed; None: never.
        victims: the ranks that are killed.

    Returns:
        Whether a process was killed.

    Raises:
        RuntimeError: a process ended with an error, or not at all.
    """
    log.write_bytes(b"")
    began = time.monotonic()
    left = {
        fork(partial(encode, arguments), log, {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}): rank
        for rank in range(world)
    }
    killed: set[int] = set()
    while left:
        for process in list(left):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                rank, code = left.pop(process), os.waitstatus_to_exitcode(status)
                if code and not (rank in killed and code == -signal.SIGKILL):
                    raise RuntimeError(f"rank {rank} ended with {code}:\n{log.read_text()[-3000:]}")
        now = time.monotonic() - began
        if moment is not None and now > moment and not killed:
            for process, rank in left.items():
                if rank in victims:
                    os.killpg(process, signal.SIGKILL)
                    killed.add(rank)
        if now > LONGEST:
            for process in left:
                os.killpg(process, signal.SIGKILL)
            raise RuntimeError(f"ranks {sorted(left.values())} did not end:\n{log.read_text()[-3000:]}")
        time.sleep(0.005)
    return bool(killed)


def encode(arguments: list[str]) -> None:
    """The job itself, in a process of its own."""
    from precompute.encode import main

    main(arguments)


def fork(run: Callable[[], None], log: str | Path, environment: Mapping[str, object]) -> int:
    """A process, and leader of a group, that runs a function and exits as a script does whose code that is.

    Args:
        run: the function.
        log: what the process prints is added to this file.
        environment: variables of the process, beside those of this one.
    """
    child = os.fork()
    if child:
        os.setpgid(child, child)  # here and there: whichever comes first
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {name: str(value) for name, value in environment.items()}
        run()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def digests(out: Path) -> dict[str, str]:
    """A hash of each file of an encoded set that training, or another job, may read."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        # config.yaml holds the folder's name; hidden files are locks, and what a killed write left. A .tmp- folder is
        # of a shard that a killed rank began and another rank finished; it is kept for an hour.
        if path.is_file() and path.name != "config.yaml" and not path.name.startswith(".") and ".tmp-" not in name:
            data = path.read_bytes()
            if path.name == "done.json":
                values = json.loads(data)
                values.pop("seconds", None)  # packed texts have none
                data = json.dumps(values).encode()
            found[name] = hashlib.sha256(data).hexdigest()
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:  # of a start that was not killed; it has what that printed
        sys.exit(f"killing: {error}")
