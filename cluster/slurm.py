"""A job as a batch script of Slurm."""

from __future__ import annotations

import math
import re
import shlex
import signal
from dataclasses import dataclass
from typing import Literal

from cluster.job import ROOT, Job
from cluster.status import AGAIN, MISTAKE

# Slurm replaces %j by the job's number and %a by that of the array's task.
LOGS = "runs/jobs"
# Statuses of an encode job that a signal ended, which does not catch them: ahead of the time limit, and by pre-emption.
ENDED_BY_USR1, ENDED_BY_TERM = 128 + signal.SIGUSR1, 128 + signal.SIGTERM


@dataclass(frozen=True)
class SlurmOptions:
    """What only Slurm has.

    Attributes:
        partition: and account, qos: of the job; None: the user's default.
        container: what runs the image: pyxis (with enroot), or Apptainer.
        python: interpreter of the machines' environment; in an image it is its own.
        directives: further options of sbatch without dashes, such as "constraint=h200".
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    container: Literal["pyxis", "apptainer"] = "pyxis"
    python: str = ".venv/bin/python"
    directives: tuple[str, ...] = ()


def script_of(job: Job, options: SlurmOptions, command: str) -> str:
    """The script for sbatch.

    Args:
        job: what is run.
        options: of Slurm.
        command: the command that made it, for its first lines.

    Raises:
        ValueError: a directive that is not one.
    """
    body = _training(job, options) if job.kind == "train" else _encoding(job, options)
    made_by = " ".join(command.split())
    return "\n".join(
        ["#!/bin/bash", f"# Made by: {made_by}", *_directives(job, options), "", "set -uo pipefail", *body, ""]
    )


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    training = job.kind == "train"
    given = {
        "job-name": job.name,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "nodes": job.machines + job.spares if training else 1,
        "ntasks-per-node": 1,
        "array": None if training else f"0-{job.machines * job.processes - 1}",
        "gres": f"gpu:{job.gpus if training else 1}" if job.gpus else None,
        "cpus-per-task": None if job.cpus is None else job.cpus * (job.processes if training else 1),
        "mem": None if job.memory_gb is None else f"{job.memory_gb if training else job.memory_gb // job.processes}G",
        "time": None if job.hours is None else math.ceil(job.hours * 60),
        "signal": f"USR1@{job.grace}",
        "output": f"{LOGS}/{job.name}-%j.log" if training else f"{LOGS}/{job.name}-%A_%a.log",
    }
    lines = [f"{key}={value}" for key, value in given.items() if value is not None]
    lines += ["requeue", "open-mode=append"]
    lines += ["no-kill"] if job.spares else []
    for line in options.directives:
        if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", line):
            raise ValueError(f"--sbatch {line}: give a long option of sbatch without its dashes, as constraint=h200")
    for line in lines:
        if re.search(r"[\s#\"'\\$`]", line):  # the script has the job's name in double quotes, too
            raise ValueError(f"{line!r}: a directive of sbatch cannot hold spaces, quotes, $ or `; give another name")
    return [f"#SBATCH --{line}" for line in (*lines, *options.directives)]


def _mounts(job: Job) -> list[str]:
    return [*map(shlex.quote, job.mounts), f'"$PWD/{LOGS}:$PWD/{LOGS}"']


def _srun(job: Job, options: SlurmOptions) -> str:
    if job.image is None or options.container == "apptainer":
        return "srun"
    image, mounts = shlex.quote(job.image), ",".join(_mounts(job))
    return (
        f"srun --container-image={image} --container-mounts={mounts} --container-workdir={ROOT} "
        "--no-container-entrypoint"
    )


def _inside(job: Job, options: SlurmOptions, script: str) -> str:
    """The command that runs a Python script, quoted already, in the image or in the machines' environment."""
    if job.image is None:
        return f"{shlex.quote(options.python)} {script}"
    if options.container == "pyxis":
        return f"python {script}"
    gpus = "--nv " if job.gpus else ""
    binds = " ".join(f"--bind {mount}" for mount in _mounts(job))
    return f"apptainer exec {gpus}{binds} --pwd {ROOT} {shlex.quote(job.image)} python {script}"


def _exports(job: Job) -> str:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.variables.items())]
    # Since 22.05 srun does not take it from sbatch.
    return "\n".join([*lines, *([] if job.cpus is None else ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"])])


def _training(job: Job, options: SlurmOptions) -> list[str]:
    check = _inside(job, options, f"cluster/check.py --gpus {job.gpus} --output {shlex.quote(job.output)}")
    launch = _inside(
        job,
        options,
        f'cluster/launch.py --machines {job.machines} --processes {job.processes} --hosts "$hosts" --logs "$logs" '
        f'--status "$logs/status" -- {shlex.join(job.command)}',
    )
    srun = _srun(job, options)
    return f"""
{_exports(job)}
machines={job.machines}
retries={job.retries}
logs="$PWD/{LOGS}/{job.name}-$SLURM_JOB_ID"  # one file per rank; shared by the machines
mkdir -p "$logs"
# Time limits and pre-emption signal the processes of the steps; this script waits for what they say.
trap : TERM USR1

# Again, from the newest checkpoint. The queue decides when. A job that `scancel` is ending is not running any more.
again() {{
    case "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID" 2>/dev/null)" in
        COMPLETING | CANCELLED) echo "job: $1 by scancel: ends"; exit {AGAIN} ;;
    esac
    echo "job: $1: queued again"
    scontrol requeue "$SLURM_JOB_ID" || echo "job: this cluster does not requeue; submit it again to go on"
    exit {AGAIN}
}}

# Counts failures in a row; a stop that was asked for ends the row.
failed() {{
    echo "$1" >>"$logs/failures"
    echo "job: $1"
    if [ "$(wc -l <"$logs/failures")" -gt "$retries" ]; then
        echo "job: failed $((retries + 1)) times in a row; see $logs"
        exit 1
    fi
}}

# Says what is wrong with the recipe. The first rank prints it as well, unless srun has ended its machine before that,
# because another one was quicker.
mistaken() {{
    echo "job: the recipe cannot run:"
    grep -hs "^error: " "$logs"/rank-*.log | sort -u | head -n 20
}}

# Sets $healthy to the machines that pass the checks.
check_machines() {{
    local nodes node pid reason pids=()
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    for node in "${{nodes[@]}}"; do
        timeout --kill-after=10 300 {srun} --overlap --nodes=1 --ntasks=1 --nodelist="$node" \\
            {check} >"$logs/check-$node.log" 2>&1 &
        pids+=($!)
    done
    healthy=()
    for node in "${{nodes[@]}}"; do
        pid=${{pids[0]}}
        pids=("${{pids[@]:1}}")
        if wait "$pid"; then
            healthy+=("$node")
        else
            reason=$(grep "cannot be used" "$logs/check-$node.log" || tail -n 1 "$logs/check-$node.log")
            echo "job: machine $node is left out: $reason"
        fi
    done
}}

while true; do
    check_machines
    if [ "${{#healthy[@]}}" -lt "$machines" ]; then
        failed "${{#healthy[@]}} of $machines machines can be used"
        again "too few machines"
    fi
    hosts=$(IFS=,; echo "${{healthy[*]:0:$machines}}")
    MASTER_ADDR=$(scontrol show node "${{healthy[0]}}" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p' | head -n 1)
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    export MASTER_ADDR MASTER_PORT
    rm -rf "$logs/status"
    {srun} --nodes="$machines" --ntasks="$machines" --nodelist="$hosts" --kill-on-bad-exit=1 --cpu-bind=none \\
        {launch}
    # Each machine says how it ended; one that says nothing was killed.
    statuses=$(cat "$logs/status"/[0-9]* 2>/dev/null | sort | uniq -c | awk '{{print $2 "x" $1}}' | tr '\\n' ' ')
    case " $statuses" in
        " 0x$machines ") exit 0 ;;
        *" {MISTAKE}x"*) mistaken; exit {MISTAKE} ;;
        " {AGAIN}x$machines ") rm -f "$logs/failures"; again "asked to stop" ;;
        *) failed "the run failed (status x machines: ${{statuses:-none}})" ;;
    esac
done""".strip("\n").split("\n")


def _encoding(job: Job, options: SlurmOptions) -> list[str]:
    """Each task of the array encodes its share of the input shards, and the last to finish merges the set."""
    encode = _inside(job, options, shlex.join(job.command))
    return f"""
{_exports(job)}
mkdir -p {LOGS}
task="${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
failures="{LOGS}/{job.name}-$task.failures"  # those in a row
export RANK=$SLURM_ARRAY_TASK_ID WORLD_SIZE={job.machines * job.processes} LOCAL_RANK=0
{_srun(job, options)} {encode}
status=$?
case "$status" in
    0 | {ENDED_BY_USR1} | {ENDED_BY_TERM}) rm -f "$failures" ;;
    *) echo "$status" >>"$failures" ;;
esac
# A mistake in the config fails again; everything else goes on with the shards that are not done.
if [ "$status" -ne 0 ] && [ "$status" -ne {MISTAKE} ]; then
    if [ "$(cat "$failures" 2>/dev/null | wc -l)" -le {job.retries} ]; then
        echo "job: status $status: queued again"
        scontrol requeue "$task" || echo "job: this cluster does not requeue; submit it again to go on"
    else
        echo "job: failed {job.retries + 1} times in a row"
    fi
fi
exit "$status"
""".strip("\n").split("\n")
