"""Start the processes of one machine; schedulers run this once on each machine of a job.

    python cluster/launch.py --machines 2 --processes 8 -- recipes/train.py yamls/sd2_base.yaml

It sets the same environment variables as `torchrun` and `composer` (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...),
but differs in three ways that matter to a scheduler:

- Signals are passed on to the processes, which get all the time that they need for a checkpoint. (torchrun and composer
  kill them after 30 s, and do not pass SIGUSR1 on.)
- The exit status is that of the processes, including 85 for "start me again". (That of torchrun is 1.)
- Each process has its own log file.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import os

from cluster.processes import Processes, rank_environments
from cluster.scheduler import place_of
from cluster.status import AGAIN, DONE, FAILED
from data.system.files import write_text
from recipes.config.command_line import path_of, user_errors


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=1, help="number of machines of the run")
    parser.add_argument("--processes", type=int, default=1, help="processes on each machine, one per GPU")
    parser.add_argument("--hosts", default="", help="names of the machines by rank, separated by commas")
    parser.add_argument("--logs", type=path_of, help="folder of the log files (default: all processes print here)")
    parser.add_argument("--status", type=path_of, help="folder for this machine's exit status")
    parser.add_argument("--patience", type=float, default=20, help="seconds for the others to end after a failure")
    parser.add_argument("command", nargs="+", help="a Python script and its arguments, after --")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = read_arguments(arguments)
    with user_errors():
        if options.processes < 1:  # none would count as done
            raise ValueError(f"--processes {options.processes}: give 1 or more")
        place = place_of(os.environ, options.machines, options.hosts.split(",") if options.hosts else [])
        environments = rank_environments(place, options.machines, options.processes)
    status = FAILED
    try:
        processes = Processes([sys.executable, *options.command], environments, options.logs, options.patience)
        with user_errors():  # where the disk refuses the logs
            status = processes.run()
    finally:
        if options.status is not None:
            write_text(options.status / str(place.machine), json.dumps(status) + "\n")
    if status not in (DONE, AGAIN):
        print(f"launch: machine {place.machine} of {options.machines} ended with status {status}", flush=True)
    # srun ends a step at the first task that fails, while other machines may still write their checkpoint.
    return DONE if options.status is not None and status == AGAIN else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
