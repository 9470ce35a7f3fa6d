"""Checks of the machine that a run is about to use. Each takes milliseconds, unless it says otherwise."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from data.cost import size_text
from data.encoded import stale_memory as stale
from data.system.ranks import Rank
from recipes.checking.finding import Finding
from recipes.config.source_code import ROOT

# Each MDS shard that is read, and each worker's socket, takes a file descriptor.
FILES = 4096
SHARED_BYTES = 1 << 30  # for streaming's state of a data set, and for batches that data workers hand over
# What a launcher sets for a run of one process, and what processes need to meet where it sets anything else.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The oldest driver that runs a major version of CUDA (NVIDIA, "CUDA Compatibility", minor version compatibility).
DRIVERS = {11: 450, 12: 525, 13: 580}
LOCKS = ("requirements.lock", "requirements-torch211.lock")
SECONDS = 60  # after which a driver hangs


def cheap_checks() -> Iterator[Finding]:
    """What every run is checked for when it starts."""
    yield open_files()
    yield shared_memory()
    yield temporary_files()
    yield threads()


def machine_checks(clear: bool = False) -> Iterator[Finding]:
    """All checks of this machine. They import torch, which takes seconds.

    Args:
        clear: remove the blocks of shared memory that dead processes have left.
    """
    yield python()
    yield packages()
    yield launcher()
    yield gpu()

    from recipes.checking.attention_kernels import attention  # imports torch, and xformers where there is a GPU

    yield attention()
    yield from cheap_checks()
    yield stale_memory(clear)
    yield load()


def python() -> Finding:
    """The version of Python that the locks are made for."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != (3, 11):
        return Finding("warning", "python", f"{version}; the locked packages are chosen for 3.11: run `make install`")
    return Finding("ok", "python", version)


def packages(locks: tuple[Path, ...] = tuple(ROOT / name for name in LOCKS)) -> Finding:
    """The installed packages, compared with the lock whose version of torch is installed.

    Args:
        locks: the lock files that there are, in order of preference.
    """
    wanted = [_locked(lock) for lock in locks]
    installed: dict[str, str] = {}
    for package in metadata.distributions():
        # The first on the path is imported: setuptools adds older copies of some packages behind it.
        installed.setdefault(_canonical(package.metadata["Name"] or ""), package.version)
    # A version such as 2.7.0+cu126 is the locked 2.7.0, built for one CUDA.
    installed = {name: version.split("+")[0] for name, version in installed.items()}
    number = next((i for i, lock in enumerate(wanted) if lock.get("torch") == installed.get("torch")), 0)
    lock, name = wanted[number], locks[number].name
    other = sorted(
        f"{package} {installed.get(package, 'is not installed')} ({version})"
        for package, version in lock.items()
        if installed.get(package) != version
    )
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        return Finding("warning", "packages", f"not those of {name}: {', '.join(other[:3])}{more}; run `make install`")
    return Finding("ok", "packages", f"{len(lock)} as in {name}")


def _locked(lock: Path) -> dict[str, str]:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return {_canonical(name): version for name, version in (line.split("==") for line in lines if "==" in line)}


def _canonical(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def gpu() -> Finding:
    """Whether torch can use the GPUs that the driver shows. Imports torch.

    The checks that follow use the GPU that this process has in a run, as those of the machine's other processes do.

    Raises:
        ValueError: the driver hangs, for which torch, and with it the checks that follow, would wait as well; or there
            are more processes than GPUs on this machine.
    """
    import torch

    from data.own_gpu import check_own_gpu

    shown, failed = _driver_gpus()
    if torch.cuda.is_available():
        check_own_gpu("GPU")
        own = int(os.environ.get("LOCAL_RANK") or 0)
        torch.cuda.set_device(own)
        name, capability = torch.cuda.get_device_name(own), torch.cuda.get_device_capability(own)
        built = torch.cuda.get_arch_list()
        # Code for a GPU runs on later ones of the same major number.
        if not any(_runs(architecture, capability) for architecture in built):
            return Finding(
                "error",
                "GPU",
                f"{name} has compute capability {capability[0]}.{capability[1]}, and torch {torch.__version__} is "
                f"built for {', '.join(built)}: install with `make install TORCH=2.11`",
            )
        driver = f", driver {shown[0][1]}" if shown else ""
        text = f"{torch.cuda.device_count()} x {name}{driver}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        return Finding("ok", "GPU", text)
    if shown:
        name, driver = shown[0]
        return Finding(
            "error",
            "GPU",
            f"the driver {driver} shows {name}, and torch {torch.__version__} cannot use it: "
            + _why_not(driver, torch.version.cuda),
        )
    if failed:
        text = f"none that torch can use; if this machine has one, mend its driver: nvidia-smi says `{failed}`"
        return Finding("warning", "GPU", text)
    return Finding("ok", "GPU", "none; runs use the CPU")


def _driver_gpus() -> tuple[list[tuple[str, str]], str]:
    """The GPUs that nvidia-smi lists, name and version of the driver; and what it says where it fails. Raises
    ValueError where it hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError("GPU: nvidia-smi hangs: the driver or a GPU is broken; restart the machine") from None
    if listed.returncode:  # its message would be taken for a GPU
        said = (listed.stdout + listed.stderr).strip()
        return [], said.splitlines()[0] if said else f"exit status {listed.returncode}"
    return [(name, driver) for name, _, driver in (line.rpartition(", ") for line in listed.stdout.splitlines())], ""


def _why_not(driver: str, cuda: str | None) -> str:
    """Why torch sees no GPU, and what to do.

    Args:
        driver: its version, such as "535.104.05".
        cuda: version of CUDA that torch is built for, such as "12.6"; None: it is built without.
    """
    if cuda is None:
        return "it is built without CUDA; run `make install`"
    needed = DRIVERS.get(int(cuda.split(".")[0]))
    if needed is not None and driver.split(".")[0].isdecimal() and int(driver.split(".")[0]) < needed:
        return f"its CUDA {cuda} needs driver {needed} or newer; update the driver"
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} may hide it, or see `nvidia-smi`"


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    match = re.fullmatch(r"sm_(\d+)(\d)a?", architecture)
    return match is not None and int(match[1]) == capability[0] and int(match[2]) <= capability[1]


def launcher() -> Finding:
    """Whether the variables of a launcher are complete: a shell may still have some of another job.

    Raises:
        ValueError: one is not a number, or RANK is not below WORLD_SIZE.
    """
    Rank.from_environment()
    other = [f"{name}={os.environ[name]}" for name, value in ALONE.items() if os.environ.get(name, value) != value]
    missing = [name for name in MEETING if not os.environ.get(name)]
    if other and missing:
        return Finding(
            "error",
            "launcher",
            f"{', '.join(other)} in the environment, without {', '.join(missing)}: start all processes by torchrun, "
            "composer or cluster/launch.py, or unset what another job has left",
        )
    port = os.environ.get("MASTER_PORT") or "1"
    if other and not (re.fullmatch("[0-9]{1,5}", port) and int(port) < 1 << 16):
        return Finding("error", "launcher", f"MASTER_PORT is {port!r} in the environment: expected a port's number")
    return Finding("ok", "launcher", ", ".join(other) or "one process")


def open_files() -> Finding:
    """The limit of open files per process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= FILES:
        return Finding("ok", "open files", "no limit" if limit == resource.RLIM_INFINITY else f"up to {limit:,}")
    return Finding("warning", "open files", f"at most {limit:,} per process: run `ulimit -n {FILES}` or more")


def shared_memory(folder: Path = stale.MEMORY) -> Finding:
    """The room for batches that data workers hand over."""
    if not folder.is_dir():
        return Finding("error", "shared memory", f"{folder} is not there, which data workers need: mount it")
    left = shutil.disk_usage(folder).free
    if left < SHARED_BYTES:
        return Finding(
            "warning",
            "shared memory",
            f"{size_text(left)} free in {folder}: start the container with --shm-size=8g or --ipc=host",
        )
    return Finding("ok", "shared memory", f"{size_text(left)} free in {folder}")


def temporary_files() -> Finding:
    """The folder that libraries write into: some end with errors of their own where there is none."""
    try:
        return Finding("ok", "temporary files", f"in {tempfile.gettempdir()}")
    except FileNotFoundError as error:
        return Finding("error", "temporary files", f"{error.strerror}: set TMPDIR to a folder that can be written")


def stale_memory(clear: bool, folder: Path = stale.MEMORY) -> Finding:
    """Blocks of shared memory that killed processes have left.

    Args:
        clear: remove those that are surely dead processes'.
        folder: of shared memory.
    """
    ours, others = stale.left_behind(folder), stale.of_others(folder)
    sizes = {path: path.stat().st_size for path in (*ours, *others) if path.exists()}
    if not sizes:
        return Finding("ok", "stale memory", f"no blocks of dead processes in {folder}")
    alone = stale.sees_all_processes()
    found = f"{len(sizes)} blocks of dead processes in {folder}, {size_text(sum(sizes.values()))}"
    unsure = f"; {len(others)} of them may be in use in other containers: look again outside of this one"
    if not clear:
        return Finding("warning", "stale memory", f"{found}; doctor.py --clear removes them")
    stale.clear(folder)
    for path in others if alone else []:
        path.unlink(missing_ok=True)
    if others and not alone:
        return Finding("warning", "stale memory", f"{found}, {len(sizes) - len(others)} removed{unsure}")
    return Finding("ok", "stale memory", f"{found}, all removed")


def threads() -> Finding:
    """Whether the processes of this machine have more threads than it has cores."""
    cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    number = os.environ.get("OMP_NUM_THREADS", "")
    if not number.isdecimal():
        return Finding("ok", "threads", f"{cores} cores, divided among the processes of a run")
    if ranks * int(number) > cores:
        return Finding(
            "warning",
            "threads",
            f"OMP_NUM_THREADS is {number} in {ranks} processes on {cores} cores: threads that wait for each other's "
            "core make a run many times slower; unset it",
        )
    return Finding("ok", "threads", f"{number} per process on {cores} cores")


def load() -> Finding:
    """Whether other programs compute on this machine."""
    cores, average = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if average > cores / 2:
        return Finding(
            "warning", "load", f"{average:.1f} on {cores} cores: other programs are running, and figures will be low"
        )
    return Finding("ok", "load", f"{average:.1f} on {cores} cores")
