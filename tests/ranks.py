"""Launches of several ranks for tests.

Importing torch, Composer and Lightning takes about ten seconds of CPU time per process. Here one server process per
test process imports them once, and every rank of every launch is forked from it. What the launchers themselves do is
tested where they are the subject (`composer` in tests/recipes/engines/composer/test_trainer.py and test_killed.py).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def launch(
    ranks: int, script: Path, *arguments: object, cwd: Path = ROOT, timeout: float = 570
) -> subprocess.CompletedProcess:
    """Runs a script on ranks of one machine with one thread each, and ends all of them when one fails.

    Returns:
        The first failed rank's exit status (0 if none failed, 124 after the timeout), and the output of all ranks.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_OWN}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{name}" for name in ("stdout", "stderr")]
        request = {
            "ranks": ranks, "words": words, "cwd": str(cwd), "environment": environment, "files": files,
            "timeout": timeout,
        }  # fmt: skip
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server of ranks has died; its own message is above"
        stdout, stderr = (Path(file).read_text(errors="replace") for file in files)
    return subprocess.CompletedProcess(words, int(answer), stdout, stderr)


@functools.cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks"],
        cwd=ROOT,
        # Lightning and torch read the number of threads when they are imported.
        env={name: value for name, value in os.environ.items() if name not in LAUNCHERS_OWN} | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.stdin.close)
    return server


# --- the server ------------------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answers requests until its input ends. A forked rank comes back from here, and ends as any process does."""
    from data.cycles import rare_searches

    with rare_searches():
        import recipes.engines.composer.trainer
        import recipes.engines.lightning.trainer  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(request["ranks"]):
            child = os.fork()
            if not child:
                _become(rank, request, port)
                return
            children.append(child)
        print(_wait(children, request["timeout"]), flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait(children: list[int], timeout: float) -> int:
    """Waits for all; after a failure or the timeout, ends those that are left. Gives the first failure's status."""
    end, status = time.monotonic() + timeout, 0
    while children:
        for child in list(children):
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                status = status or os.waitstatus_to_exitcode(code)
        if not status and time.monotonic() > end:
            status = 124
        if status:
            for child in children:  # they may wait for the failed one
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return status


def _become(rank: int, request: dict, port: int) -> None:
    """Runs the script as one rank of a launch."""
    import numpy as np

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in zip((1, 2), request["files"], strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    size = request["ranks"]
    os.environ.clear()
    os.environ.update(request["environment"])
    own = (rank, size, rank, size, 0, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(LAUNCHERS_OWN, own, strict=True)})
    os.chdir(request["cwd"])
    np.random.seed()  # forked processes share its state
    sys.argv = request["words"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
