"""A Slurm of several machines on this one: a controller and one slurmd per machine, each with a /dev/shm of its own.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. Everything lies in one folder, and all
daemons are ended with the block.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "unshare")
PORT = 26817
CONFIG = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=1,bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
FirstJobId={first}
SlurmdTimeout=900
MessageTimeout=90
KillWait=120
{machines}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=900
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why Slurm cannot be started here; None: it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    return None


class Slurm:
    """A running Slurm, with the commands of a user."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """The output of a command such as squeue."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """What scontrol says of a job, such as JobState and Restarts."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))

    def wait(self, holds, seconds: float, what: str) -> None:
        """Until a condition holds.

        Raises:
            TimeoutError: it does not in time.
        """
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}, not in {seconds:.0f} s:\n{self.ask('squeue')}")
            time.sleep(0.25)


@contextlib.contextmanager
def slurm(folder: Path, machines: list[str], prepare: dict[str, str] | None = None):
    """A Slurm whose daemons end with the block.

    Args:
        folder: for its files; not there yet.
        machines: their names.
        prepare: a shell command for some of the machines, which changes mounts that only they see.
    """
    prepare = prepare or {}
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    host = os.uname().nodename
    nodes = "\n".join(
        f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={PORT + 1 + i} CPUs=2 State=UNKNOWN"
        for i, name in enumerate(machines)
    )
    first = 1000 + secrets.randbelow(1_000_000)  # so that jobs do not append to the logs of an earlier trial
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, port=PORT, folder=folder, machines=nodes, first=first))
    found = Slurm(folder)
    daemons: list[subprocess.Popen] = []

    def start(name: str, *command: str) -> None:
        with open(folder / f"{name}.out", "wb") as out:
            daemons.append(
                subprocess.Popen(
                    command, env=found.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True,
                )  # fmt: skip
            )

    try:
        start(
            "munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log",
        )  # fmt: skip
        found.wait((folder / "munge.socket").exists, 60, "munged")
        start("slurmctld", "slurmctld", "-D", "-i")
        for name in machines:
            mounts = f"mount -t tmpfs -o size=1500m shm /dev/shm && {prepare.get(name, ':')}"
            start(
                f"slurmd-{name}", "unshare", "--mount", "--propagation", "private", "--kill-child", "sh", "-c",
                f"{mounts} && exec slurmd -D -N {name}",
            )  # fmt: skip
        found.wait(lambda: _idle(found) == len(machines), 300, "machines idle")
        yield found
    finally:
        with contextlib.suppress(Exception):
            found.ask("scancel", "--signal=KILL", "--full", "--user=root")
            found.ask("scancel", "--user=root")
            found.wait(lambda: not found.ask("squeue", "--noheader"), 30, "no job left")
        for daemon in reversed(daemons):
            _end(daemon)


def _idle(found: Slurm) -> int:
    with contextlib.suppress(RuntimeError):
        return len(found.ask("sinfo", "--noheader", "--Node", "--states=idle", "--partition=low").splitlines())
    return 0


def _end(daemon: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
            return
