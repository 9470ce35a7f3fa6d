"""The command line of `cluster/submit.py`: its options, and the checked job that they ask for."""

import argparse
from pathlib import Path

from cluster.job import Job, check_division, checked_config
from recipes.config.command_line import fail
from recipes.config.recipe import Recipe

# The schedulers, and the options that only one of them has.
OWN = {
    "slurm": ("partition", "account", "qos", "container", "python", "sbatch"),
    "kubernetes": ("namespace", "queue", "claim", "secret", "cache", "topology"),
    "skypilot": ("accelerator",),
}


def read_arguments(arguments: list[str], description: str) -> argparse.Namespace:
    """The options of all schedulers. An option of another scheduler than the named one ends the program."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheduler", choices=list(OWN))
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
