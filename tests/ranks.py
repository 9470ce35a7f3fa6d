"""Processes that tests need: workers of pytest-xdist, and launches of several ranks.

Importing torch, Composer and Lightning takes about ten seconds of CPU time per process, and more in a new checkout,
where it compiles them to bytecode. Here one server process imports them, and what recipes are built from; the workers
(tests/worker.py) and every rank of every launch are forked from it. What the launchers themselves do is tested where
they are the subject (tests/recipes/training/test_stop.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TextIO
from unittest import mock

import numpy as np

from benchmarks.gpu_run.forks import WITHOUT_CUDA

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "TESTS_RANKS_SERVER"  # environment variable that workers have
COLLECTIVES = (
    ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all_single")
    + ("all_gather_into_tensor", "reduce_scatter_tensor")
)
LAUNCHERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def launch(
    ranks: int,
    script: Path,
    *arguments: object,
    cwd: Path = ROOT,
    timeout: float = 570,
    server: str | None = None,
    variables: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Runs a script on ranks of one machine with one thread each, and ends all of them when one fails.

    A single one has no variables of a launcher, and may be a launcher itself.

    Args:
        server: address of another server than that of all tests.
        variables: of the environment, beside those of this process.

    Returns:
        The first failed rank's exit status (0 if none failed, 124 after the timeout), and the output of all ranks.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_OWN}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(variables or {})}
    words = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{name}" for name in ("stdout", "stderr")]
        request = {
            "ranks": ranks, "words": words, "cwd": str(cwd), "environment": environment, "files": files,
            "timeout": timeout, "folder": folder,
        }  # fmt: skip
        connection = _connected(server)
        connection.write(json.dumps(request) + "\n")
        connection.flush()
        for answer in connection:
            status, of = json.loads(answer)
            if of == folder:  # not of a launch before, whose test a timeout has ended
                break
        else:
            raise AssertionError("the server of ranks has died; its own message is above")
        stdout, stderr = (Path(file).read_text(errors="replace") for file in files)
    return subprocess.CompletedProcess(words, status, stdout, stderr)


@functools.cache
def _connected(server: str | None) -> TextIO:
    """A connection to a server; None: to that of the workers, or to one of this process."""
    client = socket.socket(socket.AF_UNIX)
    client.connect("\0" + (server or os.environ.get(ADDRESS) or start_server()))
    client.send(b"launches")
    connection = client.makefile("rw")
    assert connection.readline() == "ready\n", "the server of ranks has died; its own message is above"
    return connection


def start_server(variables: dict[str, str] | None = None) -> str:
    """Starts a server, which ends after its last client. Gives its address, the name of its socket.

    Its environment has `variables` beside those of this process.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_OWN}
    with socket.socket(socket.AF_UNIX) as listener:
        # Linux chooses an abstract name, which belongs to no file: a null character, and these.
        listener.bind("")
        listener.listen()
        address = listener.getsockname()[1:].decode()
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(listener.fileno())],
            cwd=ROOT,
            # Lightning and torch read the number of threads when they are imported.
            env=environment | {"OMP_NUM_THREADS": "1"} | WITHOUT_CUDA | (variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    return address


# --- the server ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Inside, what is imported must not start CUDA: forks of a process that has started it cannot use the GPU.

    Raises:
        RuntimeError: it did; or it tried to, where the driver's library says that there is a GPU.
    """
    import torch

    calls: list[str] = []

    def start(*arguments: object, **keywords: object) -> None:
        calls.extend(traceback.format_list(traceback.extract_stack()[-4:-1]))
        raise RuntimeError("CUDA is not there")

    there_is_a_gpu = torch.cuda._device_count_nvml() > 0  # which is not asked of CUDA
    functions = mock.patch.multiple(torch._C, _cuda_getDeviceCount=start, _cuda_init=start)
    with functions if there_is_a_gpu else contextlib.nullcontext():
        yield
    if calls or torch.cuda.is_initialized():
        raise RuntimeError(f"imports start CUDA: no forked process can use the GPU\n{''.join(calls)}")


def do_not_wait_for_disks() -> None:
    """From now on, this process and those that it forks leave it to the system when files come to the disk.

    A suite asks thousands of times that a file be there, which takes 5 to 10 ms each, and nothing of it has to outlast
    a power failure. What is asked for, and what becomes of an error, is tested with functions of the tests' own
    (`tests.disks.on_disk_before_named`); processes that tests start anew still wait.
    """
    os.fsync = lambda file: os.fstat(file if isinstance(file, int) else file.fileno()) and None  # not a closed one
    connect = sqlite3.connect

    def connect_without_waiting(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        with contextlib.suppress(sqlite3.Error):  # no database, as whoever asks it next is told
            connection.execute("PRAGMA synchronous=OFF")
        return connection

    sqlite3.connect = sqlite3.dbapi2.connect = connect_without_waiting


def preload() -> None:
    """Imports what workers and ranks would."""
    from data.system.garbage_collection import RARELY

    gc.set_threshold(*RARELY)
    with without_cuda():
        _import_all()


def _import_all() -> None:
    import composer.algorithms  # noqa: F401 - which Composer imports in its first run
    import torch._inductor.debug
    import torch._inductor.pattern_matcher  # which any compilation imports
    import torch.utils.tensorboard  # noqa: F401 - which the loggers of both engines import
    from composer.utils import collect_env

    import recipes.engines.composer.trainer
    from recipes.config.components import COMPONENTS

    with contextlib.suppress(ImportError):  # tests of Composer do without
        import recipes.engines.lightning.trainer  # noqa: F401

    builders = [builder for group, names in COMPONENTS.items() if group != "logger" for builder in names.values()]
    for builder in builders:
        with contextlib.suppress(ImportError):  # a test that needs what is missing says so itself
            importlib.import_module(builder.split(":")[0])
    collect_env.get_cpu_model()  # Composer's Trainer starts a process to ask for it, once per process
    # Each of its trainers and checkpoints goes through the list of its files for this: 8 ms.
    collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)
    _read_clips_words_once()


def _read_clips_words_once() -> None:
    """All of open_clip's tokenizers share what the first one has read and made, which takes 0.3 s.

    One is made per run that draws captions, per set of pictures and captions, per pipeline.
    """
    from data.tokenizers.clip_library import open_clip
    from data.tokenizers.clip_words import bound

    init, default = open_clip.SimpleTokenizer.__init__, open_clip.tokenizer.DEFAULT_CONTEXT_LENGTH
    made: dict[str, dict[str, object]] = {}

    def init_once(tokenizer: object, context_length: int | None = default, **options: object) -> None:
        if repr(options) not in made:
            init(tokenizer, **options)
            made[repr(options)] = dict(vars(tokenizer))
        vars(tokenizer).update(made[repr(options)], context_length=context_length)
        tokenizer.cache = tokenizer.cache.copy()  # of the words that it has met

    open_clip.SimpleTokenizer.__init__ = init_once
    bound(open_clip.SimpleTokenizer())  # keeps the merges, for the processes that are forked


def _serve(listener: socket.socket) -> None:
    """Forks a process for each client, until the last one has gone. A forked worker or rank comes back from here, and
    ends as any process does."""
    preload()
    gc.freeze()  # no search of a forked process copies the memory of what has been imported

    listener.settimeout(0.2)
    clients: set[int] = set()
    had_clients, parent = False, os.getppid()
    while clients or not had_clients and os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            client = os.fork()
            if not client:
                listener.close()
                _answer(connection)
                return
            connection.close()
            clients.add(client)
            had_clients = True
        clients -= {client for client in clients if os.waitpid(client, os.WNOHANG)[0]}


def _answer(connection: socket.socket) -> None:
    """Becomes a worker, or answers the requests for launches of one client until it has gone.

    A worker comes back from here at its end, and so does a forked rank.
    """
    folder, streams, *_ = socket.recv_fds(connection, 4096, 3)
    if streams:
        _work(connection, folder.decode(), streams)
        return
    with connection, connection.makefile("rw") as lines:
        print("ready", file=lines, flush=True)
        for line in lines:
            request, port = json.loads(line), free_port()
            rank, children = _fork(request["ranks"])
            if rank is not None:
                break
            status = _wait(children, request["timeout"], connection)
            if _has_gone(connection):
                os._exit(0)
            print(json.dumps([status, request["folder"]]), file=lines, flush=True)
        else:
            os._exit(0)
    _become(rank, request, port)


def _work(connection: socket.socket, folder: str, streams: list[int]) -> None:
    """Does what a new Python of execnet does: runs what it reads from standard input."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ[ADDRESS] = connection.getsockname()[1:].decode()
    os.chdir(folder)
    random.seed()  # forked processes share these states
    np.random.seed()
    sys.argv = ["-c"]
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


def _fork(ranks: int) -> tuple[int | None, list[int]]:
    """(None, processes of the ranks); in these, (rank, [])."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            return rank, []
        children.append(child)
    return None, children


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait(children: list[int], timeout: float, client: socket.socket) -> int:
    """Waits for all; after a failure or the timeout, ends those that are left, and so when the client has gone, whose
    tests were ended. Gives the first failure's status."""
    end, status = time.monotonic() + timeout, 0
    while children:
        for child in list(children):
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                status = status or os.waitstatus_to_exitcode(code)
        if not status and (time.monotonic() > end or _has_gone(client)):
            status = 124
        if status:
            for child in children:  # they may wait for the failed one
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return status


def _has_gone(client: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _become(rank: int, request: dict, port: int) -> None:
    """Runs the script as one rank of a launch."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in zip((1, 2), request["files"], strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    size = request["ranks"]
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # that of the environment
    if size > 1:
        os.environ.update(variables_of(rank, size, port))
    os.chdir(request["cwd"])
    np.random.seed()  # forked processes share its state
    do_not_wait_for_disks()
    if size > 1:
        _share_groups()
        _share_device()
        _refuse_what_nccl_refuses()
    sys.argv = request["words"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def variables_of(rank: int, size: int, port: int) -> dict[str, str]:
    """What launchers tell a rank of one machine by its environment."""
    own = (rank, size, rank, size, 0, "127.0.0.1", port)
    return {name: str(value) for name, value in zip(LAUNCHERS_OWN, own, strict=True)}


def _share_groups() -> None:
    """Meshes and subgroups get the former process group of the same ranks and description, where there is one.

    A group of gloo has a thread that wakes a hundred times per second until the process ends. A launch that trains many
    times had 290 of them, which took a quarter of its processor time.
    """
    from torch.distributed import device_mesh, distributed_c10d

    new_group, made = distributed_c10d.new_group, {}

    def former_or_new(ranks: list[int], group_desc: str | None = None, **options: object) -> object:
        key = (tuple(ranks), group_desc)
        if key not in made:
            made[key] = new_group(ranks, group_desc=group_desc, **options)
        return made[key]

    device_mesh.new_group = distributed_c10d.new_group = former_or_new


def _share_device() -> None:
    """All groups of gloo send by one device, as its options allow.

    By default each group has its own, whose thread wakes a hundred times per second until the process ends. Where a
    script names an interface, PyTorch makes the devices of it.
    """
    from torch.distributed import ProcessGroupGloo

    init, device = ProcessGroupGloo.__init__, functools.cache(ProcessGroupGloo.create_default_device)

    def init_with_device(
        group: ProcessGroupGloo, store: object, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        if "GLOO_SOCKET_IFNAME" in os.environ:
            init(group, store, rank, size, timeout)
            return
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device()], timeout
        init(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init_with_device


def _refuse_what_nccl_refuses() -> None:
    """Collectives take contiguous tensors alone, as on GPUs: gloo takes any."""
    import torch
    from torch import distributed
    from torch.utils._pytree import tree_leaves

    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def checked(collective: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(collective)
        def call(*arguments: object, **options: object) -> object:
            for tensor in tree_leaves((arguments, options)):
                if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
                    other = formats.get(tensor.dim())
                    if other is None or not tensor.is_contiguous(memory_format=other):
                        raise ValueError(f"{collective.__name__}: tensors must be contiguous")
            return collective(*arguments, **options)

        return call

    for name in COLLECTIVES:
        collective = checked(getattr(distributed, name))
        setattr(distributed, name, collective)
        setattr(distributed.distributed_c10d, name, collective)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
