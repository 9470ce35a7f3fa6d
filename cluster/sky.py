"""A job as a task of SkyPilot, which rents the machines."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from cluster.job import ROOT, Job


def task_text(job: Job, accelerator: str | None) -> str:
    """The YAML for `sky jobs launch`, whose managed jobs start again on other machines after a pre-emption.

    Args:
        job: what is run.
        accelerator: name of the GPU in SkyPilot's catalogue, such as H200.

    Raises:
        ValueError: no accelerator, or what SkyPilot does not have.
    """
    if job.gpus and accelerator is None:
        raise ValueError("--accelerator: name the GPU to rent, such as H200")
    if job.spares:
        raise ValueError("--spares: rented machines are replaced; leave it out")
    given = {"--hours": job.hours, "--mount": job.mounts, "--cpus": job.cpus, "--memory": job.memory_gb}
    for option, value in given.items():
        if value:
            raise ValueError(f"{option}: the task for SkyPilot has none; leave it out")
    sizes = f"--machines {job.machines} --processes {job.processes}"
    check = f"python cluster/check.py --gpus {job.gpus} --output {shlex.quote(job.output)}"
    command = f"{check} && exec python cluster/launch.py {sizes} -- {shlex.join(job.command)}"
    resources: dict[str, Any] = {"job_recovery": {"max_restarts_on_errors": job.retries}}
    if job.gpus:
        resources["accelerators"] = f"{accelerator}:{job.gpus}"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    place = f"cd {ROOT}" if job.image else "source .venv/bin/activate"
    task = {"name": job.name, "num_nodes": job.machines, "resources": resources}
    if job.image is None:
        task |= {"workdir": ".", "setup": "make install\n"}
    task |= {"envs": job.variables, "run": f"{place}\n{command}\n"}
    return yaml.safe_dump({key: value for key, value in task.items() if value}, sort_keys=False, width=120)
