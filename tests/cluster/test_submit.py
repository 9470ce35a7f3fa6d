"""What is submitted: scripts that parse, numbers that fit each other, and mistakes that are found before the queue."""

import contextlib
import io
import os
import re
import shlex
import subprocess

import pytest
import yaml

from cluster.command_line import read_arguments
from cluster.submit import main, text_of

TRAIN = "yamls/sd2_base.yaml"
ENCODE = "yamls/sd2_encode.yaml"
TOKENS = "yamls/dalle_12b.yaml"
CLOUD = ["--image", "registry/x:1", "--claim", "runs"]


def made(*arguments):
    return text_of(read_arguments(list(arguments), ""), shlex.join(arguments))


def directives(script):
    return dict((line[10:].split("=", 1) + [""])[:2] for line in script.splitlines() if line.startswith("#SBATCH --"))


def error_of(*arguments):
    """What main prints to standard error for a mistake."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    return errors.getvalue()


CASES = {
    "training": [TRAIN, "--machines", "16"],
    "spares and a limit": [TRAIN, "--machines", "4", "--spares", "2", "--hours", "24", "--cpus", "12"],
    "pyxis": [TRAIN, "--machines", "2", "--image", "docker://r#x:1", "--mount", "/a b:/data"],
    "apptainer": [TRAIN, "--machines", "2", "--image", "/x.sif", "--container", "apptainer", "--mount", "/d:/d"],
    "encoding": [ENCODE, "--machines", "2"],
    "a CPU": [TRAIN, "--machines", "2", "--gpus", "0"],
}


@pytest.mark.parametrize("case", CASES)
def test_scripts_of_slurm_parse(case):
    script = made("slurm", *CASES[case])
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert script.startswith("#!/bin/bash\n") and "requeue" in directives(script)
    assert script.count("apptainer exec --nv --bind /d:/d ") == (2 if case == "apptainer" else 0)
    assert script.count("--container-mounts='/a b:/data',") == script.count("--container-") / 3 == 2 * (case == "pyxis")


def test_a_training_script_asks_for_its_machines_and_is_warned_ahead_of_its_limit():
    options = ["--spares", "2", "--hours", "24", "--grace", "600", "--cpus", "12", "--memory", "800"]
    script = made("slurm", TRAIN, "--machines", "4", *options)
    found = directives(script)
    expected = {"nodes": "6", "ntasks-per-node": "1", "gres": "gpu:8", "time": "1440", "signal": "USR1@600"}
    assert {key: found[key] for key in expected} == expected
    assert (found["cpus-per-task"], found["mem"], found["open-mode"]) == ("96", "800G", "append")
    assert "no-kill" in found and "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n" in script
    assert "--machines 4 --processes 8" in script and "machines=4\n" in script


@pytest.mark.parametrize("named", [["run_name=study/lr_3e-4"], ["--name", "study/lr_3e-4"]])
def test_logs_lie_in_a_folder_that_is_there(named):
    """Slurm makes none, and its job fails without a word."""
    found = directives(made("slurm", TRAIN, *named, "--machines", "1"))
    assert (found["job-name"], found["output"]) == ("study-lr_3e-4", "runs/jobs/study-lr_3e-4-%j.log")


def test_an_encode_job_is_an_array_with_one_gpu_for_each_task():
    script = made("slurm", ENCODE, "--machines", "4", "--memory", "800", "--cpus", "14")
    found = directives(script)
    assert (found["array"], found["nodes"], found["gres"], found["mem"]) == ("0-31", "1", "gpu:1", "100G")
    assert found["cpus-per-task"] == "14" and "no-kill" not in found
    assert "RANK=$SLURM_ARRAY_TASK_ID WORLD_SIZE=32 LOCAL_RANK=0" in script


@pytest.mark.parametrize(
    ("starts", "requeued"),
    [
        ([0], 0),
        ([1, 137, 0], 2),
        ([1, 1, 137, 1], 3),  # then it gives up
        ([2], 0),  # a mistake
        ([138, 1, 143, 1, 1, 138, 1, 1, 1, 1], 9),  # stops that were asked for end the row of failures
    ],
)
def test_a_task_of_an_encode_job_that_fails_or_is_asked_to_stop_is_queued_again(starts, requeued, tmp_path):
    script = made("slurm", ENCODE, "--machines", "4", "--hours", "24")
    assert directives(script)["signal"] == "USR1@300"  # the time limit itself would end the job
    assert "trap" not in script  # `scancel` ends it, which would queue the task again otherwise
    for number, status in enumerate(starts):
        task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "5", "SLURM_RESTART_COUNT": str(number)}
        returned, _, calls = run_with_stand_ins(script, tmp_path, [str(status)], **task)
        assert returned == status
    assert [call for call in calls if "scontrol" in call] == ["scontrol requeue 7_5"] * requeued


def run_with_stand_ins(script, tmp_path, statuses, job="1", **variables):
    """Run a batch script with programs in the place of Slurm's.

    Args:
        statuses: what the machines report at each start. Where one says that it was asked to stop, Slurm has signalled
            the script, too. Of a task of an array, the status of its program.
        variables: of the environment.
    """
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir(exist_ok=True)
    programs = {
        "scontrol": 'case "$2" in hostnames) printf "a\\nb\\nc\\n";; node) echo "NodeAddr=addr-$3 x";;\n'
        '*) echo "scontrol $*" >>calls;; esac',
        "squeue": "cat state 2>/dev/null || echo RUNNING",
        "srun": 'echo "srun ${MASTER_ADDR-}:${MASTER_PORT-} $*" >>calls\n'
        'case "$*" in *encode.py*) exit "$(cat statuses)";;\n'
        '*check.py*) echo "n: cannot be used: sick"; echo "srun: error" >&2\n'
        '[ "$(cat sick 2>/dev/null)" != "$(sed "s/.*nodelist=\\(.\\).*/\\1/" <<<"$*")" ];;\n'
        '*) while [ "$1" != --status ]; do shift; done; mkdir -p "$2"; n=$(cat starts 2>/dev/null || echo 0)\n'
        'for rank in 1 2; do echo "error: seed: wrong" >"$(dirname "$2")/rank-0000$rank.log"; done\n'
        'echo $((n + 1)) >starts; i=0; for s in $(sed -n "$((n + 1))p" statuses); do echo "$s" >"$2/$i"; i=$((i+1)); '
        '[ "$s" != 85 ] || kill -USR1 "$PPID"; done;; esac',
    }
    for name, body in programs.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    (tmp_path / "statuses").write_text("\n".join(statuses) + "\n")
    environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "[a-c]"}
    environment |= variables
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, cwd=tmp_path, env=environment)
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return done.returncode, done.stdout + done.stderr, calls


def test_a_training_job_that_scancel_ends_is_not_queued_again(tmp_path):
    """Its processes say that they were asked to stop, as ahead of a time limit."""
    (tmp_path / "state").write_text("COMPLETING\n")
    script = made("slurm", TRAIN, "--machines", "2")
    returned, said, calls = run_with_stand_ins(script, tmp_path, ["85 85"])
    assert returned == 85 and "job: asked to stop by scancel: ends" in said
    assert not [call for call in calls if "requeue" in call]


OUTCOMES = {
    "done": (["0 0"], 0, 1, False),
    "asked to stop": (["85 85"], 85, 1, True),
    "a mistake": (["85 2"], 2, 1, False),
    "a crash, then done": (["137", "0 0"], 0, 2, False),
    "crashes only": (["1 85", "1", "", "137 1"], 1, 4, False),
    "one that says nothing": (["137 0", "0", "0 0"], 0, 3, False),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_what_a_script_does_after_each_way_to_end(outcome, tmp_path):
    statuses, code, starts, requeued = OUTCOMES[outcome]
    script = made("slurm", TRAIN, "--machines", "2", "--spares", "1")
    returned, text, calls = run_with_stand_ins(script, tmp_path, statuses)
    assert returned == code, text
    assert sum("launch.py" in call for call in calls) == starts
    assert any("requeue 1" in call for call in calls) == requeued
    # Also where the first rank was ended before it could print.
    assert text.count("job: the recipe cannot run:\nerror: seed: wrong\n") == text.count("error: ") == (code == 2)


def test_a_stop_that_was_asked_for_ends_a_row_of_failures(tmp_path):
    script = made("slurm", TRAIN, "--machines", "2", "--retries", "1")
    for code in 85, 0:  # which Slurm starts again
        assert run_with_stand_ins(script, tmp_path, ["1", "85 85", "1", "0 0"])[0] == code


def test_a_machine_that_fails_its_check_is_replaced_by_the_spare(tmp_path):
    (tmp_path / "sick").write_text("a")
    script = made("slurm", TRAIN, "--machines", "2", "--spares", "1")
    code, text, calls = run_with_stand_ins(script, tmp_path, ["0 0"], job="40007")
    (start,) = [call for call in calls if "launch.py" in call]
    assert code == 0 and "machine a is left out: n: cannot be used: sick\n" in text
    assert start.startswith("srun addr-b:20007 ") and "--hosts b,c " in start and "--nodelist=b,c " in start


def test_too_few_machines_queue_the_job_again_until_its_retries_are_used_up(tmp_path):
    (tmp_path / "sick").write_text("a")
    script = made("slurm", TRAIN, "--machines", "4", "--spares", "0", "training.global_batch=2048")
    code, text, calls = run_with_stand_ins(script, tmp_path, ["0 0"])
    assert code == 85 and "2 of 4 machines can be used" in text and calls[-1] == "scontrol requeue 1"


def test_words_reach_the_run_as_they_were_given():
    words = ["output=a 'b' `c` $HOME", 'callbacks.sample_grid.prompts=["a; rm -rf x", "$(b)"]']
    script = made("slurm", TRAIN, *words, "--machines", "2", "--env", "A=b 'c'")
    assert """export A='b '"'"'c'"'"''\n""" in script
    launch = next(line for line in script.splitlines() if "launch.py" in line)
    assert shlex.split(launch)[-2:] == words
    pod = yaml.safe_load(made("kubernetes", TRAIN, *words, "--machines", "2", *CLOUD))
    spec = pod["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["command"][-2:] == words


def test_a_jobset_starts_again_on_85_and_gives_up_on_a_mistake():
    options = ["--queue", "research", "--grace", "600", "--cpus", "12", "--memory", "800"]
    options += ["--mount", "/outside:/inside", "--topology", "rack"]
    found = yaml.safe_load(made("kubernetes", TRAIN, "--machines", "16", *options, *CLOUD))
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found["metadata"]["name"])
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    numbers = (job["completions"], job["parallelism"], job["backoffLimit"])
    assert job["completionMode"] == "Indexed" and numbers == (16, 16, 0)
    assert job["podReplacementPolicy"] == "Failed"  # two pods of a number would write the same checkpoint
    rules = job["podFailurePolicy"]["rules"]
    codes = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert codes == {2: "FailJob", 85: "Ignore"}
    assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]
    assert all(("onExitCodes" in rule) != ("onPodConditions" in rule) for rule in rules)  # the API allows one of them
    failure = found["spec"]["failurePolicy"]
    assert failure["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    assert failure["maxRestarts"] == 3
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert pod["restartPolicy"] == "Never" and pod["securityContext"]["runAsUser"] == 1000
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["mount-0"]["hostPath"]["path"] == "/outside"
    assert {"name": "mount-0", "mountPath": "/inside"} in container["volumeMounts"]
    assert job["template"]["metadata"] == {"annotations": {"kueue.x-k8s.io/podset-preferred-topology": "rack"}}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "400G"}
    resources = {"nvidia.com/gpu": 8, "cpu": 96, "memory": "800G"}
    assert container["resources"]["limits"] == container["resources"]["requests"] == resources
    address = next(v["value"] for v in container["env"] if v["name"] == "MASTER_ADDR")
    name = found["metadata"]["name"]
    assert found["spec"]["network"] == {"enableDNSHostnames": True}  # which gives machine 0 the name
    assert address == f"{name}-{found['spec']['replicatedJobs'][0]['name']}-0-0.{name}"


def test_a_pod_checks_its_machine_and_becomes_the_launcher(tmp_path):
    """Which gets the signals that are meant for the process that the pod starts."""
    (tmp_path / "python").write_text('#!/bin/bash\n[[ "$*" = *launch.py* ]] && echo $$ "$@" || exit "$STATUS"\n')
    (tmp_path / "python").chmod(0o755)
    found = yaml.safe_load(made("kubernetes", TRAIN, "--machines", "2", *CLOUD))
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for status in "0", "1":  # of the machine's check
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STATUS": status}
        started = subprocess.Popen(pod["containers"][0]["command"], env=environment, stdout=subprocess.PIPE, text=True)
        text, _ = started.communicate()
        launched = f"{started.pid} cluster/launch.py --machines 2 --processes 8 -- recipes/train.py {TRAIN}\n"
        assert text == (launched if status == "0" else "") and started.returncode == int(status)


def test_an_encode_job_of_kubernetes_tries_each_task_by_itself():
    options = ["--machines", "2", "--secret", "keys", "--cache", "/mnt/nvme", "--cpus", "14", "--memory", "800"]
    found = yaml.safe_load(made("kubernetes", ENCODE, *options, *CLOUD))
    job, container = found["spec"], found["spec"]["template"]["spec"]["containers"][0]
    assert (found["kind"], job["completions"], job["backoffLimitPerIndex"]) == ("Job", 16, 3)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1, "cpu": 14, "memory": "100G"}
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    variables = {v["name"]: v for v in container["env"]}
    assert variables["WORLD_SIZE"]["value"] == "16" and "job-completion-index" in str(variables["RANK"])
    assert {"hostPath": {"path": "/mnt/nvme", "type": "DirectoryOrCreate"}, "name": "cache"} in job["template"]["spec"][
        "volumes"
    ]
    assert "namespace" not in found["metadata"]
    found = yaml.safe_load(made("kubernetes", ENCODE, "--namespace", "team", *options, *CLOUD))
    assert found["metadata"]["namespace"] == "team"


def test_a_task_of_skypilot():
    found = yaml.safe_load(made("skypilot", TRAIN, "--machines", "2", "--accelerator", "H200", "--dry-run"))
    assert (found["num_nodes"], found["resources"]["accelerators"]) == (2, "H200:8")
    assert subprocess.run(["bash", "-n"], input=found["run"], text=True).returncode == 0
    assert shlex.split(found["run"].splitlines()[-1])[-2:] == ["recipes/train.py", TRAIN]
    assert found["setup"] == "make install\n" and "image_id" not in found["resources"]
    one = ["skypilot", TRAIN, "--machines", "1", "--dry-run"]
    found = yaml.safe_load(made(*one, "--accelerator", "H200", "--image", "me/x:1"))
    assert found["resources"]["image_id"] == "docker:me/x:1" and not found.keys() & {"setup", "workdir"}
    assert "--accelerator: name the GPU" in error_of(*one)


MISTAKES = {
    "--machines 16": [TRAIN, "--machines", "15"],  # the nearest number that divides the batch
    "groups of 16 devices do not fit into machines of 8": [TOKENS, "training.tensor_parallel=16", "--machines", "2"],
    "replicas: 4 does not divide 8 devices in groups of 4": [
        TOKENS, "training.tensor_parallel=4", "training.fsdp.replicas=4", "--gpus", "4", "--machines", "2",
    ],
    "over 3 groups of 8 devices; it would over 2 x 8: --machines 2": [
        TOKENS, "training.tensor_parallel=8", "training.global_batch=4", "--machines", "3",
    ],
    "leaves 2 groups of devices, between which only FSDP averages gradients; set training.fsdp={}\n": [
        "yamls/dalle_1b.yaml", "training.tensor_parallel=8", "--machines", "2",
    ],
    "did you mean": ["yamls/sd2_bas.yaml", "--machines", "1"],
    "training.globl_batch": [TRAIN, "training.globl_batch=2", "--machines", "1"],
    "neither a recipe": ["yamls/openmoji_vocabulary.yaml", "--machines", "1"],
    "--hours 0.05": [TRAIN, "--machines", "1", "--hours", "0.05"],
    "autoresume": [TRAIN, "checkpoints.autoresume=false", "--machines", "1"],
    "--mount x": [TRAIN, "--machines", "1", "--mount", "x"],
    "--mount: nothing": [TRAIN, "--machines", "1", "--image", "x"],
    "quotes": [TRAIN, "--machines", "1", "--name", "a b"],
    "quotes, $ or `": [TRAIN, "--machines", "1", "run_name=a`id`"],
    "--sbatch --exclusive": [TRAIN, "--machines", "1", "--sbatch=--exclusive"],
    "--memory 7: give 8 or more": [ENCODE, "--machines", "1", "--memory", "7"],  # or a task gets 0
    "--cpus 0: give 1 or more": [TRAIN, "--machines", "1", "--cpus", "0"],
    "--machines 0: give 1 or more": [TRAIN, "--machines", "0"],
    "the image has its own yamls/ only": [
        os.path.abspath(TRAIN), "--machines", "1", "--image", "x", "--mount", "/d:/d",
    ],
    "--spares: the processes of an encode job": [ENCODE, "--machines", "1", "--spares", "1"],
    "--env 1=2": [TRAIN, "--machines", "1", "--env", "1=2"],
    "--env HF_HOME: give NAME=VALUE": [TRAIN, "--machines", "1", "--env", "HF_HOME"],
    "sbatch is not": [TRAIN, "--machines", "1"],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_queued(mistake, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    text = error_of("slurm", *MISTAKES[mistake])
    assert mistake.removesuffix("=2") in text and text.count("\n") == 1, text


def test_each_of_several_mistakes_is_an_error():
    lines = error_of("slurm", TRAIN, "--machines", "1", "training.globl_batch=2", "training.precison=fp32").splitlines()
    assert [line.partition(": unknown")[0] for line in lines] == [
        "error: training.globl_batch", "error: training.precison",
    ]  # fmt: skip


def test_kubernetes_needs_an_image_and_a_volume():
    assert "--image" in error_of("kubernetes", TRAIN, "--machines", "1", "--dry-run")
    assert "--claim" in error_of("kubernetes", TRAIN, "--machines", "1", "--image", "x", "--dry-run")


@pytest.mark.parametrize(
    ("option", "schedulers"),
    [
        (["--hours", "24"], ["kubernetes", "skypilot"]),
        (["--spares", "1"], ["kubernetes", "skypilot"]),
        (["--mount", "/data:/data"], ["skypilot"]),
        (["--cpus", "4"], ["skypilot"]),
        (["--memory", "64"], ["skypilot"]),
        (["--partition", "gpu"], ["kubernetes", "skypilot"]),
        (["--sbatch", "exclusive"], ["kubernetes"]),
        (["--claim", "runs"], ["slurm", "skypilot"]),
        (["--accelerator", "H200"], ["slurm", "kubernetes"]),
    ],
)
def test_an_option_that_a_scheduler_does_not_have_is_not_passed_over(option, schedulers):
    needed = {"slurm": [], "kubernetes": CLOUD, "skypilot": ["--accelerator", "H200"]}
    for scheduler in schedulers:
        error = error_of(scheduler, TRAIN, "--machines", "1", *needed[scheduler], *option, "--dry-run")
        assert error.startswith(f"error: {option[0]}: ") and error.endswith("; leave it out\n")


def test_slurm_gets_the_script_and_a_folder_for_its_logs(monkeypatch, tmp_path):
    monkeypatch.setattr("cluster.submit.ROOT", tmp_path)
    (tmp_path / "sbatch").write_text("#!/bin/sh\ncat > given.sh\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["slurm", TRAIN, "--machines", "1"]) == 3  # what sbatch says of it
    script = (tmp_path / "given.sh").read_text()
    assert (tmp_path / directives(script)["output"]).parent.is_dir()
    assert script == made("slurm", TRAIN, "--machines", "1").replace("slurm", "python cluster/submit.py slurm", 1)


def test_what_rented_machines_write_has_to_outlive_them(monkeypatch):
    submitted = []
    monkeypatch.setattr("cluster.submit.submit", lambda scheduler, text: submitted.append(scheduler) or 0)
    rent = ["--machines", "1", "--accelerator", "H200"]
    assert "checkpoints.bucket: not set" in error_of("skypilot", TRAIN, *rent)
    assert "upload: not set" in error_of("skypilot", ENCODE, *rent)
    several = ["--machines", "2", *rent[2:]]
    assert "share no folder" in error_of("skypilot", TRAIN, "checkpoints.bucket=s3://runs/sd2", *several)
    assert not submitted
    assert main(["skypilot", TRAIN, "checkpoints.bucket=s3://runs/sd2", *rent]) == 0
    assert main(["skypilot", ENCODE, "upload=s3://sets/sd2", *rent]) == 0
    assert submitted == ["skypilot", "skypilot"]
