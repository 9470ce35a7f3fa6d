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

from cluster.job import Job, check_division, checked_config
from cluster.kubernetes import KubernetesOptions, manifest_text
from cluster.sky import task_text
from cluster.slurm import LOGS, SlurmOptions, script_of
from recipes.config.command_line import fail, user_errors
from recipes.config.recipe import Recipe
from recipes.config.values import ConfigError

# What takes the text on its standard input, and where it can be had.
SUBMITTERS = {
    "slurm": (["sbatch"], "a login node of the cluster"),
    "kubernetes": (["kubectl", "create", "-f", "-"], "a machine with access to the cluster"),
    "skypilot": (["sky", "jobs", "launch", "--yes", "/dev/stdin"], "a machine with SkyPilot"),
}

# Options that only one scheduler has.
OWN = {
    "slurm": ("partition", "account", "qos", "container", "python", "sbatch"),
    "kubernetes": ("namespace", "queue", "claim", "secret", "cache", "topology"),
    "skypilot": ("accelerator",),
}


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheduler", choices=list(SUBMITTERS))
    parser.add_argument("yaml", help="a recipe or an encode job, by its path from the root of the repository")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the job, and submit nothing")
    add("--machines", type=int, required=True, help="number of machines")
    add("--gpus", type=int, default=8, help="GPUs of each machine (8); 0: one process on its CPU")
    add("--spares", type=int, default=0, help="slurm: further machines that replace broken ones")
    add("--name", help="name of the job (the run's name)")
    add("--hours", type=float, help="time limit of one start; the job is then queued again and continues")
    add("--grace", type=int, default=300, help="seconds for a checkpoint before the job is stopped (300)")
    add("--retries", type=int, default=3, help="restarts after failures in a row (3)")
    add("--image", help="container image (default: the environment of the checkout)")
    add("--mount", action="append", default=[], metavar="OUTSIDE:INSIDE", help="a mounted folder; repeatable")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable; repeatable")
    add("--cpus", type=int, help="cores for each process")
    add("--memory", type=int, help="host memory of each machine in GB")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--partition")
    slurm.add_argument("--account")
    slurm.add_argument("--qos")
    slurm.add_argument("--container", choices=("pyxis", "apptainer"), default="pyxis", help="what runs the image")
    slurm.add_argument("--python", default=".venv/bin/python", help="interpreter, if there is no image")
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="option of sbatch; repeatable")
    kubernetes = parser.add_argument_group("kubernetes")
    kubernetes.add_argument("--namespace")
    kubernetes.add_argument("--queue", help="LocalQueue of Kueue")
    kubernetes.add_argument("--claim", help="PersistentVolumeClaim for runs/")
    kubernetes.add_argument("--secret", help="Secret; each of its keys becomes an environment variable")
    kubernetes.add_argument("--cache", help="folder of each machine, at /cache in the pods")
    kubernetes.add_argument("--topology", help="label by which Kueue places pods close to each other")
    parser.add_argument_group("skypilot").add_argument("--accelerator", help="GPU to rent, such as H200")
    options = parser.parse_intermixed_args(arguments)
    for scheduler, names in OWN.items():
        for name in names if scheduler != options.scheduler else ():
            if getattr(options, name) != parser.get_default(name):
                fail([f"--{name}: an option of {scheduler} only; leave it out"])
    return options


def job_of(options: argparse.Namespace) -> Job:
    """The checked job of a command line.

    Raises:
        ValueError: a mistake in the YAML or in the options.
    """
    overrides = tuple(options.overrides)
    config = checked_config(options.yaml, overrides)
    training = isinstance(config, Recipe)
    variables = [text.partition("=") for text in options.env]
    wrong = next((name for name, sign, _ in variables if not sign), None)
    if wrong is not None:
        raise ValueError(f"--env {wrong}: give NAME=VALUE")
    name = options.name or (config.run_name if training else Path(options.yaml).stem)
    job = Job(
        kind="train" if training else "encode",
        yaml=options.yaml,
        overrides=overrides,
        name=name.replace("/", "-"),  # it is part of the names of logs, for which Slurm makes no folders
        output=config.output if training else config.out,
        machines=options.machines,
        gpus=options.gpus,
        spares=options.spares,
        hours=options.hours,
        grace=options.grace,
        retries=options.retries,
        image=options.image,
        mounts=tuple(options.mount),
        environment=tuple((name, value) for name, _, value in variables),
        cpus=options.cpus,
        memory_gb=options.memory,
        address=config.checkpoints.bucket if training else config.upload,
    )
    if training:
        check_division(config, job.machines, job.processes)
        if not config.checkpoints.resumes:
            raise ValueError(
                "checkpoints: save and autoresume must be true, or each start of the job would begin the run anew"
            )
    return job


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
    options = read_arguments(arguments)
    try:
        with user_errors():
            text = text_of(options, shlex.join(["python", "cluster/submit.py", *arguments]))
            if options.dry_run:
                print(text, end="")
                return 0
            return submit(options.scheduler, text)
    except ConfigError as error:
        fail(error.lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
