"""Submit a training run or an encode job to a cluster, or print what would be submitted.

    python cluster/submit.py slurm yamls/sd2_base.yaml --machines 16 --hours 24 --dry-run
    python cluster/submit.py slurm yamls/sd2_encode.yaml out=/data/latents_256 --machines 8
    python cluster/submit.py kubernetes yamls/sd2_base.yaml training.precision=amp_bf16 --machines 16 \\
        --image registry.example.com/precompose:1 --claim runs --queue research --dry-run
    python cluster/submit.py skypilot yamls/sd2_base.yaml --machines 2 --accelerator H200 --dry-run

The YAML and its overrides are checked before the job is submitted. docs/cluster.md explains what a job does when it is
pre-empted, reaches its time limit or loses a machine.
"""

import argparse
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import shutil
import subprocess

from cluster.command_line import OWN, job_of, read_arguments
from cluster.kubernetes import KubernetesOptions, manifest_text
from cluster.sky import task_text
from cluster.slurm import LOGS, SlurmOptions, script_of
from recipes.config.command_line import user_errors

# What takes the text on its standard input, and where it can be had.
SUBMITTERS = {
    "slurm": (["sbatch"], "a login node of the cluster"),
    "kubernetes": (["kubectl", "create", "-f", "-"], "a machine with access to the cluster"),
    "skypilot": (["sky", "jobs", "launch", "--yes", "/dev/stdin"], "a machine with SkyPilot"),
}


def text_of(options: argparse.Namespace, command: str) -> str:
    """What is submitted: a batch script or YAML. Raises as `job_of`."""
    job = job_of(options)
    if options.scheduler == "kubernetes":
        return manifest_text(job, KubernetesOptions(**{name: getattr(options, name) for name in OWN["kubernetes"]}))
    if options.scheduler == "skypilot":
        if job.address is None and not options.dry_run:
            key = "checkpoints.bucket" if job.kind == "train" else "upload"
            raise ValueError(
                f"{key}: not set, and the disks of rented machines go with them; name an address in a bucket, or add "
                "file_mounts to the task that --dry-run prints"
            )
        if job.machines > 1 and not options.dry_run:
            raise ValueError(
                f"--machines {job.machines}: rented machines share no folder, and a job on several needs one for what "
                "it writes; give 1, or add file_mounts for runs to the task that --dry-run prints"
            )
        return task_text(job, options.accelerator)
    if job.image is not None and not job.mounts:
        raise ValueError(f"--mount: nothing of {job.output} would outlive the container; mount runs/ and the data")
    own = SlurmOptions(
        options.partition, options.account, options.qos, options.container, options.python, tuple(options.sbatch)
    )
    return script_of(job, own, command)


def submit(scheduler: str, text: str) -> int:
    """Hand a job to its scheduler; the exit status of the program that takes it.

    Raises:
        ValueError: the program is not on this machine.
    """
    command, place = SUBMITTERS[scheduler]
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is not on this machine: submit from {place}, or print the job with --dry-run")
    if scheduler == "slurm":
        (ROOT / LOGS).mkdir(parents=True, exist_ok=True)  # Slurm makes no folders for logs, and fails without a word
    return subprocess.run(command, input=text, text=True, check=False, cwd=ROOT).returncode


def main(arguments: list[str]) -> int:
    options = read_arguments(arguments, __doc__)
    with user_errors():
        text = text_of(options, shlex.join(["python", "cluster/submit.py", *arguments]))
        if options.dry_run:
            print(text, end="")
            return 0
        return submit(options.scheduler, text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
