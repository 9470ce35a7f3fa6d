"""Which machine of a job this is, as schedulers say it in the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A machine among those of a job.

    Attributes:
        machine: its number, from 0.
        address: of the machine whose number is 0.
        port: there, at which processes meet.
    """

    machine: int
    address: str
    port: int


def place_of(environment: Mapping[str, str], machines: int, hosts: Sequence[str] = ()) -> Place:
    """This machine's place, from the variables of Slurm, of an indexed Job of Kubernetes, or of SkyPilot.

    Args:
        environment: of this process. MASTER_ADDR and MASTER_PORT are set by the job; with one machine they need not be.
        machines: number of machines of the run.
        hosts: under Slurm, the names of the machines in their order; the others of the allocation are spare.

    Raises:
        ValueError: no scheduler says which machine this is, or it says something else than the job.
    """
    name = environment.get("SLURMD_NODENAME", "")
    number = next(
        (environment[key] for key in ("JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK") if key in environment), None
    )
    if hosts and len(hosts) != machines:
        raise ValueError(f"--hosts names {len(hosts)} machines, and --machines says {machines}")
    if hosts:
        if name not in hosts:
            raise ValueError(f"SLURMD_NODENAME is {name!r} in the environment, which --hosts {','.join(hosts)} lacks")
        machine = hosts.index(name)
    elif number is not None:
        if not number.isdecimal() or int(number) >= machines:
            raise ValueError(f"this machine's number is {number!r} in the environment, of {machines} machines")
        machine = int(number)
    elif machines == 1:
        machine = 0
    else:
        raise ValueError(
            f"which of {machines} machines is this? Neither --hosts nor JOB_COMPLETION_INDEX nor SKYPILOT_NODE_RANK "
            "is given; start it by the script that cluster/submit.py makes"
        )
    address = environment.get("MASTER_ADDR") or (environment.get("SKYPILOT_NODE_IPS") or "").split("\n")[0]
    if not address and machines > 1:
        raise ValueError("MASTER_ADDR is not set: give the address of machine 0")
    port = environment.get("MASTER_PORT") or "29500"
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"MASTER_PORT is {port!r} in the environment: give a port of machine 0, from 1 to 65535")
    return Place(machine, address or "127.0.0.1", int(port))
