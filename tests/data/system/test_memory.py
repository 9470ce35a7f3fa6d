"""The memory of a container, not of its machine, and files that do not fit into it."""

import io
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from streaming import MDSWriter, Stream

from benchmarks.killing import fork
from data.encoded.dataset import open_loader
from data.latents import LatentDataset
from data.loading import Placement
from data.sources.base import Sample
from data.sources.filters import Filter
from data.system.arrays import read_matrix
from data.system.memory import MEMORY, NotEnoughMemory, limit, memory_to_read
from recipes.comparison.pictures import WHOLE, read_pictures
from recipes.config.command_line import user_errors
from recipes.engines.checkpoints.plain_pickles import damaged, load_plain
from recipes.models.config_files import build_from
from recipes.models.weights import read_tensors

DOCKER = "/docker/ab12"  # on the machine; in the container its folder is the root


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/\n", {"memory.max": "8589934592\n"}, 8 << 30),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 3000),
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "2000"}, 2000),
        (f"4:cpu,memory:{DOCKER}\n0::/\n", {"memory/memory.limit_in_bytes": "5000"}, 5000),
        ("4:memory:/a\n", {"memory/memory.limit_in_bytes": str(2**63), "memory/a/memory.limit_in_bytes": "70"}, 70),
        ("4:cpuset:/\n", {}, None),
        (None, {}, None),
    ],
)
def test_the_smallest_limit_counts(tmp_path, groups, files, found):
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    if groups is not None:
        (tmp_path / "of_process").write_text(groups)
    assert limit(tmp_path / "of_process", tmp_path / "groups") == found


def test_here():
    assert 1 << 28 < MEMORY < 1 << 50


ROOM = 40 << 20  # bytes
SIDE = 5000  # a quarter of the rows of a matrix of bytes that does not fit into the room


def bits(folder):
    return np.random.default_rng(0).integers(0, 255, (4 * SIDE, SIDE), np.uint8)


def checkpoint(folder):
    torch.save({"a": torch.from_numpy(bits(folder))}, folder / "checkpoint.pt")
    return lambda: load_plain(folder / "checkpoint.pt")


def part(folder):
    torch.save({"a": torch.from_numpy(bits(folder))}, folder / "checkpoint.pt")
    data = (folder / "checkpoint.pt").read_bytes()

    def read():
        with damaged(f"{folder}: damaged"):
            load_plain(io.BytesIO(data))

    return read


def weights(folder):
    torch.save({"a": torch.from_numpy(bits(folder))}, folder / "weights.pt")
    return lambda: read_tensors(folder / "weights.pt")


def matrix(folder):
    np.save(folder / "matrix.npy", bits(folder))
    return lambda: read_matrix(folder / "matrix.npy", (4 * SIDE, SIDE))


def picture(folder):
    # Grey, which takes a quarter of the memory of what it is decoded into: this process keeps what it has had.
    Image.new("L", (9000, 9000)).save(folder / "picture.png")
    sample = Sample("a", (folder / "picture.png").read_bytes(), "a caption")
    return lambda: Filter().decode(sample)


def mapped(folder):
    # It is mapped twice: there is room for the first time.
    save_file({"a": torch.zeros(3 * ROOM // 4, dtype=torch.uint8)}, folder / "weights.safetensors")
    return lambda: read_tensors(folder / "weights.safetensors")


def network(folder):
    (folder / "config.json").write_text("{}")
    weights = {"weight": torch.empty(4 * SIDE, SIDE, device="meta")}
    return lambda: build_from(folder / "config.json", lambda _: torch.nn.Linear(SIDE, 4 * SIDE), weights)


def grid(folder):
    grids = folder / next(iter(WHOLE))
    grids.mkdir()
    Image.new("L", (9000, 9000)).save(grids / "ba1.png")
    return lambda: read_pictures(folder, {}, 1, 64, float("inf"))


def compressed(folder, workers=0):
    # One large array, since this process keeps the memory of small ones.
    sides = {"mean_8": (4 * SIDE, SIDE), "std_8": (1, 1), "text": (1, 1)}
    columns = {"key": "str"} | {name: f"ndarray:uint8:{height},{width}" for name, (height, width) in sides.items()}
    with MDSWriter(out=str(folder), columns=columns, compression="gz:1", size_limit=None) as writer:
        writer.write({"key": "a"} | {name: np.zeros(shape, np.uint8) for name, shape in sides.items()})
    dataset = LatentDataset(resolution=8, text="text", streams=[Stream(local=str(folder))], batch_size=1)
    loader = open_loader(dataset, Placement(1, training=True), workers, drop_last=False)
    return lambda: list(loader)


def compressed_for_a_worker(folder):
    return compressed(folder, workers=1)


READS = [
    checkpoint, part, weights, mapped, matrix, picture, network, grid, compressed, compressed_for_a_worker,
]  # fmt: skip


def test_damaged_bytes_that_claim_much_lack_no_memory():
    """Its user is told to write the file again, and not to find more memory."""
    for size, kind in ((5, MemoryError), (1 << 60, NotEnoughMemory)):
        with pytest.raises(MemoryError) as error, memory_to_read("a file", size):
            raise MemoryError("of what the bytes claim")
        assert type(error.value) is kind


@pytest.mark.parametrize("reads", READS)
def test_what_does_not_fit_into_memory_is_not_damaged(reads, tmp_path):
    """A run would tell its user to remove the checkpoint, and an encode job would reject the image for ever."""
    read = reads(tmp_path)

    def run():
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
        sys.stderr = sys.__stderr__  # not what pytest has put there
        with user_errors():
            read()

    child = fork(run, tmp_path / "log.txt", {})
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = (tmp_path / "log.txt").read_text()
    assert status == 2 and said.startswith("error: not enough memory") and said.count("\n") == 1, said
