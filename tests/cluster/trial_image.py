"""The image, built and used as the docs say: help, training, going on, encoding, health, and what is in it.

`make test-image` runs it. It takes many minutes and 30 GB of disk, so it is not part of `make test`. IMAGE=name tries
an image that has been built; BASE=name builds on another base image. What it makes is removed again.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.cluster.image_here import STAND_IN, engine
from tests.cluster.test_submit import made
from tests.conftest import SMALL, SPLITS

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
TAG = "localhost/precompose-trial"
REVISION = "0123abc"
PATIENCE = 1800  # seconds for each stage, on a machine that does much else
WATCHDOG = 10  # seconds
FIRST = 12  # batches
VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
RUN = "runs/small"
OVERRIDES = [
    *SMALL,
    "data.streams.train.path=runs/latents/train",
    "evals.val.streams.val.path=runs/latents/val",
    f"output={RUN}",
    "model.denoiser={channels: [32,32,32,32], heads: [1,1,1,1], text_width: 16}",
    "checkpoints={every: 6ba, keep: 2, autoresume: true}",
    "callbacks.export={name: export}",
    "callbacks.progress.seconds=0",
    f"training.watchdog={WATCHDOG}",
]
INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps({d.metadata["Name"]: d.version for d in distributions(path=["/venv/lib/python3.11/site-packages"])}))
"""
COMPILES = """
import torch
x = torch.linspace(-1, 1, 64)
assert torch.allclose(torch.compile(lambda x: torch.sin(x) * x + 1)(x), torch.sin(x) * x + 1)
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]


@pytest.fixture(scope="module")
def tools():
    try:
        return engine()
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def image(tools):
    if os.environ.get("IMAGE"):
        yield os.environ["IMAGE"]
        return
    base = os.environ.get("BASE") or tools.base()
    tools.build(TAG, f"--build-arg=REVISION={REVISION}", *([f"--build-arg=BASE={base}"] if base else []))
    yield TAG
    tools.remove(TAG)
    if base == STAND_IN:
        tools.remove(base)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, latent_sets, drawings, vae_folder, clip_folder):
    """A runs folder with nothing but what is read: latents, and what a second encode job needs."""
    folder = tmp_path_factory.mktemp("image") / "runs"
    for name, source in {"latents": latent_sets, "drawings": drawings, "vae": vae_folder, "clip": clip_folder}.items():
        shutil.copytree(source, folder / name)
    values = yaml.safe_load((latent_sets.parent / "encode.yaml").read_text())
    values["out"] = "runs/encoded"
    values["sources"] = {split: {"name": "tars", "urls": f"runs/drawings/{split}/*.tar"} for split in SPLITS}
    values["image_encoder"]["path"], values["text_encoder"]["path"] = "runs/vae", "runs/clip"
    (folder / "encode.yaml").write_text(yaml.safe_dump(values))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)  # uid 1000 is nobody here
    return folder


@pytest.fixture(scope="module")
def inside(tools, image, runs):
    """(words, variables) -> the command that runs in the container."""
    with tools.container(image, runs) as command:
        yield command


@pytest.fixture(scope="module")
def entrypoint(tools, image):
    return tools.config(image)["Entrypoint"]


def output_of(command, status=0):
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status, f"status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout + done.stderr


def wait_for(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}, not in {PATIENCE} s")
        time.sleep(1)


def test_the_image_says_what_it_is_and_how_it_runs(tools, image):
    config = tools.config(image)
    assert (config["User"], config["WorkingDir"]) == ("1000", "/precompose")
    assert config["Entrypoint"] == ["composer", "recipes/train.py"] and config["Cmd"] == ["--help"]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["licenses"] == "Apache-2.0" and labels["base.name"]
    if not os.environ.get("IMAGE"):
        assert labels["revision"] == REVISION
    assert config["Healthcheck"]["Test"] == ["CMD", "python", "/precompose/cluster/health.py"]
    secrets = [name for name in ("PIP_", "UV_", "SSL_") if any(value.startswith(name) for value in config["Env"])]
    assert not secrets, "settings of the machine that built the image are in it"
    print(f"\nimage: {tools.size(image)}")


def test_the_list_of_packages_is_what_is_installed_and_that_is_the_lock(inside):
    locked = dict(line.split("==") for line in LOCK.read_text().splitlines())
    installed = json.loads(output_of(inside(["python", "-c", INSTALLED])))
    listed = json.loads(output_of(inside(["cat", "/usr/share/doc/precompose/sbom.cdx.json"])))
    assert listed["bomFormat"] == "CycloneDX" and listed["metadata"]["component"]["name"] == "precompose"

    def normal(versions):
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions}

    assert normal(installed.items()) == locked
    components = listed["components"]
    assert normal((part["name"], part["version"]) for part in components) == locked
    assert len(components) == len(locked)
    assert all(part["purl"].startswith("pkg:pypi/") for part in components)
    doctor = subprocess.run(inside(["python", "recipes/doctor.py"], VARIABLES), capture_output=True, text=True).stdout
    assert f"packages: {len(locked)} as in {LOCK.name}" in doctor
    # Debian's packages are in Debian's own list.
    debian = output_of(inside(["dpkg-query", "-W"])).split()
    assert "g++" in debian and "libc6-dev:amd64" in debian and "python3-pip" not in debian


def test_only_what_is_needed_is_in_it(inside):
    top = output_of(inside(["sh", "-c", "ls -A /precompose"])).split()
    folders = {"recipes", "callbacks", "data", "precompute", "cluster", "yamls", "runs"}
    assert set(top) == folders | {"LICENSE", "NOTICE", "requirements.lock", "requirements-torch211.lock"}
    places = "/precompose /build /var/cache /var/lib/apt/lists /tmp /usr/local/bin"
    unwanted = ("__pycache__", "test_*", "pip", "pip3*", "*.whl", "*_Packages", "*.deb")
    names = " -o ".join(f"-name '{name}'" for name in unwanted)
    search = rf"find {places} -path /precompose/runs -prune -o \( {names} \) -print"
    found = subprocess.run(inside(["sh", "-c", search]), capture_output=True)
    assert found.stdout == b""
    # The one who runs it owns nothing but runs/, and cannot change the code.
    written = output_of(inside(["find", "/precompose", "/venv/bin", "-writable", "-not", "-type", "l"])).split()
    assert {path for path in written if not path.startswith("/precompose/runs")} == set()
    assert output_of(inside(["id", "-u"])).strip() == "1000"


def test_without_arguments_it_helps(inside, entrypoint, tools, image):
    text = output_of(inside([*entrypoint, *tools.config(image)["Cmd"]]))
    assert "Train a recipe." in text and "training.global_batch" in text


def test_compilers_are_there(inside):
    output_of(inside(["gcc", "--version"]))  # which Triton calls
    output_of(inside(["python", "-c", COMPILES], VARIABLES))


def test_it_trains_and_goes_on_and_its_health_shows_a_hang(inside, entrypoint, tools, image, runs):
    recipe = ["yamls/sd2_base.yaml", *OVERRIDES]
    text = output_of(inside([*entrypoint, *recipe, f"training.duration={FIRST}ba"], VARIABLES))
    assert re.search(rf"batch {FIRST}, loss \d+\.\d+", text)
    checkpoints = runs / "small" / "checkpoints"
    assert any(f"-ba{FIRST}" in path.name for path in checkpoints.iterdir())
    assert json.loads((runs / "small" / "export" / "done.json").read_text())
    assert (runs / "small" / "export" / "unet" / "diffusion_pytorch_model.safetensors").stat().st_uid == 1000

    # It goes on for long, as the manifest of Kubernetes starts it.
    words = ["kubernetes", *recipe, "training.duration=100000ba", "--machines", "1", "--gpus", "0"]
    manifest = yaml.safe_load(made(*words, "--image", image, "--claim", "runs"))
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == 1000
    (pod,) = spec["containers"]
    check = tools.config(image)["Healthcheck"]["Test"][1:]

    def health():
        done = subprocess.run(inside(check), capture_output=True, text=True, timeout=PATIENCE)
        return done.returncode, done.stdout

    def send(number):
        code = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"
        output_of(inside(["python", "-c", code, str(process), str(int(number))]))

    variables = {value["name"]: value["value"] for value in pod["env"]} | VARIABLES | {"MASTER_ADDR": "127.0.0.1"}
    assert health() == (0, "ok:      run: no process that shows signs of life, or not yet\n")
    log = runs / "long.log"
    with open(log, "w") as out:
        started = subprocess.Popen(inside(pod["command"], variables), stdout=out, stderr=out)
    try:
        wait_for(lambda: f"batch {FIRST + 8}," in log.read_text() or started.poll() is not None, "batches")
        assert started.poll() is None, log.read_text()[-4000:]
        wait_for(lambda: "1 processes go on" in health()[1], "a heartbeat")
        process = int(output_of(inside(["ls", "/tmp/heartbeats"])))
        wait_for(lambda: health()[0] == 0, "health")
        send(signal.SIGSTOP)
        wait_for(lambda: health()[0] == 1, "the health check that finds the run stopped")
        assert f"process {process} has shown no sign of life" in health()[1]
        send(signal.SIGCONT)
        wait_for(lambda: health()[0] == 0, "health again")
        send(signal.SIGTERM)
        assert started.wait(PATIENCE) == 85, log.read_text()[-4000:]
    finally:
        if started.poll() is None:
            with contextlib.suppress(Exception):
                send(signal.SIGKILL)
            started.kill()
    stopped = int(re.search(r"stopped after batch (\d+);", log.read_text())[1])
    assert f"batch {FIRST}," not in log.read_text() and f"batch {FIRST + 1}," in log.read_text()
    assert any(f"-ba{stopped}" in path.name for path in checkpoints.iterdir())
    assert health()[0] == 0 and output_of(inside(["ls", "/tmp/heartbeats"])) == ""


def test_it_encodes(inside, runs):
    output_of(inside(["python", "precompute/encode.py", "runs/encode.yaml"], VARIABLES))
    for split in SPLITS:
        samples = [json.loads((runs / name / split / "manifest.json").read_text()) for name in ("encoded", "latents")]
        assert samples[0]["samples"] == samples[1]["samples"] > 0
    assert (runs / "encoded" / "train").stat().st_uid == 1000
