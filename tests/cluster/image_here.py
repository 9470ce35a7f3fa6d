"""Engines that build and run the image on this machine: docker where its daemon answers, and otherwise buildah.

buildah needs root, but neither a daemon nor the right to make namespaces (`--isolation chroot`): its containers have
files of their own, and share network and processes with this machine. Where the base image cannot be fetched, a Debian
with its own Python 3.11 at the same place stands in for it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import uuid
from abc import ABC, abstractmethod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("buildah", "mmdebstrap")
STAND_IN = "localhost/python-stand-in:bookworm"
# What the official image has, as far as the Dockerfile relies on it.
INSIDE_STAND_IN = "python3.11,python3.11-venv,libpython3.11-dev,ca-certificates"
LINKS = """
for name in python3.11 python3 python; do ln -s /usr/bin/python3.11 /usr/local/bin/$name; done
"""
# Where pip and uv find packages here; the Dockerfile takes these as arguments.
ARGUMENTS = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def ask(*command: str, **options) -> str:
    """The output of a command.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def engine() -> "Docker | Buildah":
    """The engine of this machine. Installs buildah where this is root on Debian.

    Raises:
        RuntimeError: there is none; says what is missing.
    """
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        return Docker()
    missing = [program for program in PACKAGES if shutil.which(program) is None]
    install = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    if os.geteuid() != 0:
        raise RuntimeError(f"no docker daemon answers, and buildah needs root here: as root, {install}")
    if missing and shutil.which("apt-get") is None:
        raise RuntimeError(f"no docker daemon answers, and there is no {', '.join(missing)}: install them")
    if missing:
        ask("apt-get", "update")
        ask(*install.split(), "--yes", env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    return Buildah()


class Engine(ABC):
    """Builds an image, and runs commands in one container at a time."""

    def build(self, tag: str, *options: str) -> None:
        """Build the Dockerfile; a failure shows the end of its output."""
        given = [f"--build-arg={name}={os.environ[name]}" for name in ARGUMENTS if os.environ.get(name)]
        ask(*self.BUILD, *self.more(), *options, *given, "--tag", tag, str(ROOT), env=os.environ | self.ENVIRONMENT)

    def more(self) -> list[str]:
        """Options of a build that this machine needs."""
        return []

    @abstractmethod
    def config(self, image: str) -> dict:
        """User, Entrypoint, Cmd, Labels, Env and Healthcheck of an image."""

    @abstractmethod
    def size(self, image: str) -> str:
        """What an image takes on the disk."""

    @abstractmethod
    def container(self, image: str, runs: Path) -> contextlib.AbstractContextManager:
        """(words, variables) -> a command that runs in one container, as often as it is called. All commands see the
        same files and processes."""

    @abstractmethod
    def base(self) -> str | None:
        """The image to build on in place of the Dockerfile's; None: that one."""

    @abstractmethod
    def remove(self, image: str) -> None:
        """Remove an image."""


class Docker(Engine):
    BUILD = ("docker", "build")
    ENVIRONMENT = {"DOCKER_BUILDKIT": "1"}

    def base(self) -> str | None:
        return None  # docker fetches the one that the Dockerfile names

    def config(self, image):
        return json.loads(ask("docker", "image", "inspect", image))[0]["Config"]

    def size(self, image):
        return f"{int(ask('docker', 'image', 'inspect', '--format', '{{.Size}}', image)) / 1e9:.2f} GB"

    @contextlib.contextmanager
    def container(self, image, runs):
        name = f"precompose-trial-{uuid.uuid4().hex[:8]}"
        # The container itself does nothing, so that it outlives what is tried in it. --init ends what is left.
        ask("docker", "run", "--detach", "--init", "--name", name, "--shm-size=1g", f"--volume={runs}:/precompose/runs",
            "--entrypoint=sleep", image, "infinity")  # fmt: skip

        def command(words, variables=None):
            given = [f"--env={key}={value}" for key, value in (variables or {}).items()]
            return ["docker", "exec", *given, name, *words]

        try:
            yield command
        finally:
            ask("docker", "rm", "--force", name)

    def remove(self, image):
        ask("docker", "image", "rm", image)


class Buildah(Engine):
    # The format of OCI has no health check.
    BUILD = ("buildah", "bud", "--isolation=chroot", "--network=host", "--format=docker", "--pull=false")
    ENVIRONMENT = {}

    def base(self) -> str | None:
        """The image that stands in for the Dockerfile's, which is then made; None: that one could be fetched."""
        text = (ROOT / "Dockerfile").read_text()
        name = next(line for line in text.splitlines() if line.startswith("ARG BASE=")).removeprefix("ARG BASE=")
        if subprocess.run(["buildah", "pull", "--quiet", f"docker.io/library/{name}"], capture_output=True).returncode:
            make_stand_in()
            return STAND_IN
        return f"docker.io/library/{name}"

    def more(self):
        options = []
        # pip and uv trust certificates of their own. Behind a proxy that signs anew, only this machine's will do.
        if CERTIFICATES.is_file():
            options.append(f"--volume={CERTIFICATES}:{CERTIFICATES}:ro")
            options += [f"--build-arg={name}={CERTIFICATES}" for name in ("PIP_CERT", "SSL_CERT_FILE")]
        # What uv has downloaded on this machine is used, and added to.
        cache = os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv"
        if Path(cache).is_dir():
            options.append(f"--volume={cache}:/var/cache/uv")
        return options

    def config(self, image):
        return json.loads(ask("buildah", "inspect", "--type=image", image))["Docker"]["config"]

    def size(self, image):
        return json.loads(ask("buildah", "images", "--json", image))[0]["size"]

    @contextlib.contextmanager
    def container(self, image, runs):
        name = ask("buildah", "from", "--pull-never", image).strip()

        def command(words, variables=None):
            given = [f"--env={key}={value}" for key, value in (variables or {}).items()]
            return ["buildah", "run", "--isolation=chroot", "--network=host", f"--volume={runs}:/precompose/runs",
                    *given, name, "--", *words]  # fmt: skip

        try:
            yield command
        finally:
            ask("buildah", "rm", name)

    def remove(self, image):
        ask("buildah", "rmi", image)


def make_stand_in() -> None:
    """A Debian bookworm with Python at /usr/local/bin, under the name STAND_IN; minutes, unless it is there."""
    if subprocess.run(["buildah", "inspect", "--type=image", STAND_IN], capture_output=True).returncode == 0:
        return
    name = ask("buildah", "from", "scratch").strip()
    try:
        root = ask("buildah", "mount", name).strip()
        ask("mmdebstrap", "--variant=minbase", f"--include={INSIDE_STAND_IN}", "--aptopt=APT::Install-Recommends false",
            f"--customize-hook=chroot \"$1\" sh -c '{LINKS}'", "--format=directory", "bookworm", root)  # fmt: skip
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        ask("buildah", "config", f"--env=PATH={path}", "--cmd=python3", name)
        ask("buildah", "commit", "--quiet", "--format=docker", name, STAND_IN)
    finally:
        ask("buildah", "rm", name)
