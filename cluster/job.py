"""What is submitted: a checked recipe or encode job, and the machines that it gets. It knows no scheduler."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from precompute.config import EncodeConfig
from recipes.config.reading import read_values
from recipes.config.recipe import Recipe, load_config
from recipes.planning.devices import Devices

ROOT = "/precompose"  # of the repository in the image
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# Quiet unless something is wrong; the rest depends on the site, and is given by --env.
ENVIRONMENT = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@dataclass(frozen=True)
class Job:
    """A run and its machines.

    Attributes:
        kind: train: one run over all machines; encode: independent processes, each with its share of the input shards.
        yaml: path of the YAML, from the root of the repository. With an image it must be in there.
        overrides: `key=value` arguments.
        name: of the job.
        output: folder in which the run writes.
        machines: number of machines.
        gpus: GPUs of each machine; 0: one process per machine, on its CPU.
        spares: machines that wait for one to fail.
        hours: limit of time of one start, after which the job is started again; None: the scheduler's.
        grace: seconds ahead of the limit at which the run is asked to save a checkpoint.
        retries: starts after a failure, before the job gives up.
        image: container image; None: the environment of the machines.
        mounts: folders of the machine in the container, as "outside:inside".
        environment: further variables.
        cpus: cores for each process; None: the scheduler's default.
        memory_gb: host memory of each machine in GB; None: the scheduler's default.
        address: in an object store, to which what the run writes is copied; None: nothing is.
    """

    kind: Literal["train", "encode"]
    yaml: str
    overrides: tuple[str, ...]
    name: str
    output: str
    machines: int
    gpus: int
    spares: int = 0
    hours: float | None = None
    grace: int = 300
    retries: int = 3
    image: str | None = None
    mounts: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    cpus: int | None = None
    memory_gb: int | None = None
    address: str | None = None

    @property
    def processes(self) -> int:
        """Processes on each machine."""
        return max(1, self.gpus)

    @property
    def script(self) -> str:
        """The script that each process runs."""
        return "recipes/train.py" if self.kind == "train" else "precompute/encode.py"

    @property
    def command(self) -> tuple[str, ...]:
        """The script with its arguments."""
        return (self.script, self.yaml, *self.overrides)

    @property
    def variables(self) -> dict[str, str]:
        """Environment of the processes."""
        return {**(ENVIRONMENT if self.gpus else {}), **dict(self.environment)}

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a number out of range, or a text that is not of its form.
        """
        limits = {
            "machines": (self.machines, 1),
            "gpus": (self.gpus, 0),
            "spares": (self.spares, 0),
            "grace": (self.grace, 1),
            "retries": (self.retries, 0),
            "cpus": (self.cpus, 1),
            # Each task of an encode job gets its share, and Slurm takes 0 for all memory of the machine.
            "memory": (self.memory_gb, self.processes),
        }
        for key, (number, least) in limits.items():
            if number is not None and number < least:
                raise ValueError(f"--{key} {number}: give {least} or more")
        if self.hours is not None and self.hours * 3600 <= self.grace:
            raise ValueError(f"--hours {self.hours:g}: give more than the {self.grace} s of --grace")
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:,]*:/[^:,]*", mount):
                raise ValueError(f"--mount {mount}: give two absolute paths, as /data:/data")
        for name, _ in self.environment:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"--env {name}: not a name of a variable; give NAME=VALUE")
        path = PurePosixPath(self.yaml)
        if self.image is not None and (path.is_absolute() or ".." in path.parts):
            raise ValueError(f"{self.yaml}: the image has its own yamls/ only; name one of those")
        if self.spares and self.kind == "encode":
            raise ValueError("--spares: the processes of an encode job do not wait for each other; leave it out")


def checked_config(yaml: str, overrides: tuple[str, ...]) -> Recipe | EncodeConfig:
    """The recipe or encode job of a YAML. Inputs need not be on this machine.

    Raises:
        ConfigError: all mistakes, one line each.
        ValueError: it is neither of the two.
    """
    values = read_values(yaml, list(overrides))
    for key, cls in (("model", Recipe), ("image_encoder", EncodeConfig)):
        if key in values:
            return load_config(yaml, list(overrides), cls, [])
    raise ValueError(f"{yaml}: neither a recipe (it has no `model`) nor an encode job (no `image_encoder`)")


def check_division(recipe: Recipe, machines: int, processes: int) -> None:
    """Whether the batch, the replicas and the tensor parallel groups of a recipe divide over the processes of a job.

    Raises:
        ValueError: they do not; the message names the nearest number of machines that does. Or nothing would average
            the gradients of the groups.
    """
    try:
        devices = _divide(recipe, machines, processes)
    except ValueError as error:
        fitting = [n for n in range(1, 2 * machines) if _divides(recipe, n, processes)]
        nearest = min(fitting, key=lambda n: abs(n - machines), default=None)
        advice = "" if nearest is None else f"; it would over {nearest} x {processes}: --machines {nearest}"
        raise ValueError(f"{error}{advice}") from None
    devices.check_groups(recipe.training)


def _divide(recipe: Recipe, machines: int, processes: int) -> Devices:
    """Divide as the run itself does when it starts. Raises ValueError where that does not work out."""
    recipe.training.device_batch(machines * processes)
    return Devices.of(recipe.training, machines * processes, processes)


def _divides(recipe: Recipe, machines: int, processes: int) -> bool:
    try:
        _divide(recipe, machines, processes)
    except ValueError:
        return False
    return True
