"""The processes of one machine: started together, signalled together, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from cluster.scheduler import Place
from cluster.status import AGAIN, DONE, status_of
from recipes.training.stop import SIGNALS

POLL = 0.1  # seconds
COPYING = 10.0  # seconds that `tee` gets when all processes have ended; a data worker of a killed one may live on


def rank_environments(place: Place, machines: int, processes: int) -> list[dict[str, str]]:
    """The variables that tell each process of this machine its rank, as `torchrun` sets them."""
    return [
        {
            "RANK": str(place.machine * processes + local),
            "WORLD_SIZE": str(machines * processes),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(processes),
            "NODE_RANK": str(place.machine),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
            "PYTHONUNBUFFERED": "1",
        }
        for local in range(processes)
    ]


class Processes:
    """Processes that run one command with different environments.

    Signals to this process are passed on to them. Where one fails, the others get `patience` seconds to notice it by
    themselves, as all do that have the same mistake; then SIGTERM, and after `patience` more SIGKILL. Where one ends
    with 85 or 0, the others are waited for: the scheduler knows how long a checkpoint may take.
    """

    def __init__(
        self, command: Sequence[str], environments: Sequence[dict[str, str]], logs: Path | None, patience: float
    ) -> None:
        """
        Args:
            command: program and arguments.
            environments: variables of each process, which are added to those of this one.
            logs: folder of one log file per process, to which a later start appends. The first of all ranks prints
                here as well. None: all print here.
            patience: seconds, see above.
        """
        self.command = list(command)
        self.environments = environments
        self.logs = logs
        self.patience = patience
        self.started: list[subprocess.Popen[bytes]] = []
        self.early: list[int] = []  # signals that came before there were processes
        self.copy: subprocess.Popen[bytes] | None = None  # of what the first of all ranks prints

    def run(self) -> int:
        """Start the processes, and wait until all have ended; their common status, see `status_of`."""
        before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        try:
            for environment in self.environments:
                self.started.append(self._start(environment))
            for number in self.early:
                self._signal(number)
            return self._wait()
        finally:
            self._signal(signal.SIGKILL)
            for process in self.started:
                process.wait()
            if self.copy is not None:  # a container, or a step of Slurm, ends with this process, and `tee` with it
                with suppress(subprocess.TimeoutExpired):
                    self.copy.wait(COPYING)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **environment}
        if self.logs is None:
            return subprocess.Popen(self.command, env=environment)
        self.logs.mkdir(parents=True, exist_ok=True)
        with open(self.logs / f"rank-{int(environment['RANK']):05d}.log", "ab") as log:
            if environment["RANK"] == "0":
                return self._start_with_copy(environment, log.name)
            return subprocess.Popen(self.command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _start_with_copy(self, environment: dict[str, str], log: str) -> subprocess.Popen[bytes]:
        """A process whose lines appear here and in its log file.

        `tee` lives until the last process has closed its pipe: Slurm signals all processes of a step, and without `tee`
        the process could not print that it has saved a checkpoint.
        """
        script = "trap '' INT TERM USR1; exec tee -a \"$1\""
        self.copy = subprocess.Popen(["sh", "-c", script, "tee", log], stdin=subprocess.PIPE)
        try:
            return subprocess.Popen(self.command, env=environment, stdout=self.copy.stdin, stderr=subprocess.STDOUT)
        finally:
            self.copy.stdin.close()

    def _wait(self) -> int:
        failed_at: float | None = None
        blamed: list[int] = []  # codes of those that had ended before others were signalled
        while True:
            codes = [process.poll() for process in self.started]
            known = [code for code in codes if code is not None]
            if failed_at is None and any(code not in (DONE, AGAIN) for code in known):
                failed_at = time.monotonic()
            waited = 0.0 if failed_at is None else time.monotonic() - failed_at
            if len(known) == len(codes):
                return status_of(blamed or known)
            if waited > 2 * self.patience:
                self._signal(signal.SIGKILL)
            elif waited > self.patience and not blamed:
                blamed = known
                self._signal(signal.SIGTERM)
            time.sleep(POLL)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if len(self.started) < len(self.environments):
            self.early.append(number)
        self._signal(number)

    def _signal(self, number: int) -> None:
        for process in self.started:
            process.send_signal(number)  # nothing, where it has ended
