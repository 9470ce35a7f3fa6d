"""Jobs on a real Slurm of three machines, started here: killed, pre-empted, and finished as if nothing had happened.

`make test-cluster` runs it. It needs root and takes minutes, so it is not part of `make test`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.cluster.slurm_here import slurm, why_not
from tests.conftest import SMALL, SPLITS

ROOT = Path(__file__).resolve().parents[2]
LENGTH, EVERY = 60, 6  # batches
PATIENCE = 1800  # seconds for each stage, on a machine that does much else
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = why_not()
    if reason is not None:
        pytest.fail(reason, pytrace=False)
    folder = tmp_path_factory.mktemp("slurm")
    sick = folder / "sick"
    sick.mkdir()
    # On the first machine this folder cannot be written: what a broken mount of a file system looks like.
    with slurm(folder / "slurm", ["m1", "m2", "m3"], {"m1": f"mount -t tmpfs -o ro none {sick}"}) as found:
        yield found, sick


def submit(cluster, *arguments):
    """The number of a job that cluster/submit.py has submitted."""
    done = subprocess.run(
        [sys.executable, "cluster/submit.py", "slurm", *arguments, "--gpus", "0", "--python", sys.executable,
         "--env", "OMP_NUM_THREADS=1", "--env", "MKL_NUM_THREADS=1"],
        cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()[-1]


def train(cluster, latent_sets, output, name, *options):
    overrides = [
        *SMALL,
        f"data.streams.train.path={latent_sets}/train",
        f"evals.val.streams.val.path={latent_sets}/val",
        f"output={output}",
        f"training.duration={LENGTH}ba",
        "evals.val=null",
        "model.denoiser={channels: [32,32,32,32], heads: [1,1,1,1], text_width: 16}",
        f"checkpoints={{every: {EVERY}ba, keep: 2, autoresume: true}}",
        "callbacks.export={name: export}",
        "callbacks.progress.seconds=0",
    ]
    return submit(cluster, "yamls/sd2_base.yaml", *overrides, "--machines", "2", "--name", name, *options)


def log_of(name, job):
    return (ROOT / "runs" / "jobs" / f"{name}-{job}.log").read_text()


def processes(job, script):
    """Numbers of the processes of a job, or of an array, that run a script: by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = dict(v.split(b"=", 1) for v in (folder / "environ").read_bytes().split(b"\0") if b"=" in v)
        except OSError:
            continue
        jobs = (variables.get(b"SLURM_JOB_ID"), variables.get(b"SLURM_ARRAY_JOB_ID"))
        if job.encode() in jobs and words[1:2] == [script.encode()]:
            found[int(variables[b"RANK"])] = int(folder.name)
    return found


def ended(cluster, job):
    return cluster.state(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


def weights(output):
    return load_file(output / "export" / "unet" / "diffusion_pytorch_model.safetensors")


def test_a_run_that_is_killed_and_preempted_ends_as_one_that_is_left_alone(cluster, latent_sets, tmp_path):
    cluster, sick = cluster
    whole, broken = tmp_path / "whole", sick / "run"
    job = train(cluster, latent_sets, whole, "whole")
    cluster.wait(lambda: ended(cluster, job), PATIENCE, "the run that is left alone")
    assert cluster.state(job)["JobState"] == "COMPLETED", log_of("whole", job)

    job = train(cluster, latent_sets, broken, "broken", "--spares", "1")

    def newest():
        return max((int(p.name.split("-ba")[1].split("-")[0].split(".")[0])
                    for p in (broken / "checkpoints").glob("ep*-ba*")), default=0)  # fmt: skip

    cluster.wait(lambda: newest() >= EVERY, PATIENCE, "a checkpoint")
    killed = processes(job, "recipes/train.py")
    assert sorted(killed) == [0, 1]
    os.kill(killed[1], signal.SIGKILL)
    at_kill = newest()
    cluster.wait(lambda: newest() >= at_kill + 2 * EVERY, PATIENCE, "a checkpoint after the kill")
    # A job that comes before it takes all machines. The run is held meanwhile, so that it is not over before.
    for number in processes(job, "recipes/train.py").values():
        os.kill(number, signal.SIGSTOP)
    at_preemption = newest()
    first = subprocess.run(
        ["sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null",
         "--wrap", "sleep 5"],
        env=cluster.environment, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    cluster.wait(lambda: cluster.state(job)["PreemptTime"] != "None", PATIENCE, "the pre-emption")
    for number in processes(job, "recipes/train.py").values():
        os.kill(number, signal.SIGCONT)
    cluster.wait(lambda: ended(cluster, first), PATIENCE, "the job that comes first")
    assert newest() < LENGTH, "the run was over before it could be pre-empted"
    cluster.wait(lambda: ended(cluster, job), PATIENCE, "the run that was stopped twice")
    text = log_of("broken", job)
    assert cluster.state(job)["JobState"] == "COMPLETED", text
    assert text.count("asked to stop: queued again") == 1
    assert "machine m1 is left out" in text and "Read-only file system" in text
    assert "the run failed" in text and "x1" in text
    stopped = int(re.search(r"stopped after batch (\d+);", text)[1])
    assert at_preemption <= stopped < LENGTH

    expected, got = weights(whole), weights(broken)
    assert expected.keys() == got.keys()
    assert all((expected[name] == got[name]).all() for name in expected), "other weights than those of the whole run"
    last = f"batch {LENGTH}, loss "
    losses = [t.split(last)[1].split(",")[0] for t in (log_of("whole", job_of("whole")), text)]
    assert losses[0] == losses[1]


def job_of(name):
    return max((ROOT / "runs" / "jobs").glob(f"{name}-*.log"), key=lambda p: p.stat().st_mtime).stem.split("-")[-1]


def test_a_mistake_that_only_the_machines_can_see_is_not_tried_again(cluster, latent_sets, tmp_path):
    cluster, _ = cluster
    job = train(cluster, tmp_path / "nothing", tmp_path / "run", "mistake")
    cluster.wait(lambda: ended(cluster, job), PATIENCE, "the run with a mistake")
    text = log_of("mistake", job)
    assert cluster.state(job)["ExitCode"] == "2:0" and cluster.state(job)["Restarts"] == "0", text
    assert text.count("the recipe cannot run") == 1 and "data.streams.train.path" in text


def test_an_encode_job_whose_tasks_are_killed_or_signalled_completes_the_set(cluster, latent_sets, tmp_path):
    """Slurm signals the other one as ahead of a time limit, of which the least is longer than this job."""
    cluster, _ = cluster
    out = tmp_path / "latents"
    job = submit(cluster, str(latent_sets.parent / "encode.yaml"), f"out={out}", "--machines", "2", "--name", "encode")
    cluster.wait(lambda: {0, 1} <= set(processes(job, "precompute/encode.py")), PATIENCE, "both tasks")
    cluster.ask("scancel", "--signal=USR1", f"{job}_0")
    os.kill(processes(job, "precompute/encode.py")[1], signal.SIGKILL)
    cluster.wait(lambda: all((out / split / "manifest.json").is_file() for split in SPLITS), PATIENCE, "both sets")
    for split in SPLITS:
        made, expected = (json.loads((root / split / "manifest.json").read_text()) for root in (out, latent_sets))
        assert made["samples"] == expected["samples"] > 0
        shards, others = (
            {p.parent.name: p.read_bytes() for p in (root / split).rglob("*.mds")} for root in (out, latent_sets)
        )
        assert shards == others and len(shards) == SPLITS[split][0]
    logs = "".join(p.read_text() for p in (ROOT / "runs" / "jobs").glob(f"encode-{job}_*.log"))
    assert "job: status 138: queued again" in logs and "job: status 137: queued again" in logs, logs


def test_jobs_that_are_cancelled_do_not_come_back(cluster, latent_sets, tmp_path):
    cluster, _ = cluster
    encode = str(latent_sets.parent / "encode.yaml")
    jobs = {
        "recipes/train.py": train(cluster, latent_sets, tmp_path / "run", "cancelled"),
        "precompute/encode.py": submit(
            cluster, encode, f"out={tmp_path / 'latents'}", "--machines", "1", "--name", "cancelled-encode"
        ),
    }
    for script, job in jobs.items():
        cluster.wait(lambda script=script, job=job: 0 in processes(job, script), PATIENCE, script)
        cluster.ask("scancel", job)
    for job in jobs.values():
        cluster.wait(lambda job=job: ended(cluster, job), PATIENCE, "the end of a job")
        assert cluster.state(job)["JobState"] == "CANCELLED" and cluster.state(job)["Restarts"] == "0"
