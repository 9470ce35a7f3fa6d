"""Page-locked memory: as much as the tensors take, each with its own part of it."""

import gc
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.algorithms.averaging import page_locked
from recipes.algorithms.averaging.page_locked import ALIGNMENT, PageLocked

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6)


class Driver:
    """Stands in for CUDA's registration of memory."""

    def __init__(self, monkeypatch, error=None):
        self.locked = {}
        self.error = error
        monkeypatch.setattr(page_locked, "_register", self.register)
        monkeypatch.setattr(page_locked, "_unregister", lambda block: self.locked.pop(block.data_ptr()))

    def register(self, block):
        if self.error is None:
            self.locked[block.data_ptr()] = block.numel()
        return self.error


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


def test_its_size_is_that_of_the_tensors(driver):
    """PyTorch's allocator would round 2^20 + 1 elements up to 2^21."""
    tensors = [torch.zeros(2**20 + 1), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(0)]
    memory = PageLocked(tensors)
    needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    assert needed <= memory.bytes < needed + len(tensors) * ALIGNMENT
    assert list(driver.locked.values()) == [memory.bytes]


def test_it_is_unlocked_at_its_end(driver):
    memory = PageLocked([torch.ones(7)])
    (view,) = memory.views
    view.fill_(3)
    del memory
    gc.collect()
    assert not driver.locked
    assert torch.equal(view, torch.full((7,), 3.0))  # the memory itself lives as long as a tensor in it


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is in memory")
def test_forked_processes_do_not_get_it(driver):
    """Pages that two processes have are copied when one writes, and the GPU would go on with the old ones."""
    memory = PageLocked([torch.ones(100_000)])
    address, inside, flags = memory.views[0].data_ptr(), False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags += line.split()[1:]
    assert "dc" in flags  # "do not copy area on fork"


@given(st.data())
def test_views_are_apart(data):
    formats = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
    tensors = [torch.zeros(shape, dtype=data.draw(st.sampled_from(formats))) for shape in data.draw(SHAPES)]
    with pytest.MonkeyPatch.context() as patch:
        Driver(patch)
        views = PageLocked(tensors).views
    for number, view in enumerate(views):
        view.fill_(number)
    assert len(views) == len(tensors)
    for number, (view, tensor) in enumerate(zip(views, tensors, strict=True)):
        assert (view.shape, view.dtype, view.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert (view == number).all()


def test_memory_formats_stay(driver):
    tensor = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (view,) = PageLocked([tensor]).views
    assert view.stride() == tensor.stride()


def test_without_locks_it_is_ordinary_memory(monkeypatch, capsys):
    Driver(monkeypatch, "cudaErrorMemoryAllocation")
    (view,) = PageLocked([torch.zeros(4)]).views
    assert view.fill_(1).sum() == 4
    assert "could not be page-locked (cudaErrorMemoryAllocation); training waits" in capsys.readouterr().out


def test_a_refusal_is_named_and_not_left_to_the_next_kernel(monkeypatch):
    """CUDA's runtime as far as it matters here: it keeps an error until a kernel's check reads it."""

    class Runtime:
        kept = 0

        def cudaHostRegister(self, pointer, size, flags):
            self.kept = 2
            return 2

        def cudaGetErrorString(self, error):
            return {2: "out of memory"}[error]

        def kernel(self, *args, **options):
            error, self.kept = self.kept, 0
            if error:
                raise RuntimeError("CUDA error: out of memory")

    runtime, block = Runtime(), torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.kernel)
    assert page_locked._register(block) == "out of memory"
    assert runtime.kept == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_training_goes_on_after_a_refusal():
    memory = PageLocked([torch.zeros(2**20, device="cuda")])  # which is given back with this object
    (view,) = memory.views
    error = page_locked._register(view.view(torch.uint8))  # a second time
    assert "already" in error
    assert torch.arange(3, device="cuda").add(1).sum().item() == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_copies_do_not_wait():
    tensors = [torch.randn(2**20 + 1, device="cuda"), torch.randn(5, device="cuda").bfloat16()]
    memory = PageLocked(tensors)
    assert all(view.is_pinned() for view in memory.views)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for view, tensor in zip(memory.views, tensors, strict=True):
            view.copy_(tensor, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(torch.equal(view, tensor.cpu()) for view, tensor in zip(memory.views, tensors, strict=True))
