"""Gradients that are averaged block by block; tests/recipes/engines/test_equality.py compares runs."""

from pathlib import Path

import pytest

from tests.recipes.algorithms.gradients import all_reduce_ranks
from tests.stub_gpu import needs_stub_gpu


@pytest.mark.slow
@pytest.mark.parametrize("check", all_reduce_ranks.CHECKS)
def test_two_ranks(two_ranks, check):
    two_ranks(check)


@needs_stub_gpu
@pytest.mark.slow
def test_a_gpu_copies_gradients_by_a_few_kernels(stub_gpu):
    """Also in channels_last, and to 16 bits and back: otherwise PyTorch would copy them one by one."""
    done = stub_gpu(Path(__file__).with_name("all_reduce_on_stub_gpu.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("row:")]
    assert [row[0] for row in rows] == ["torch.float32", "torch.bfloat16"]
    assert all(int(parameters) == 60 and 0 < int(launches) <= 8 for _, parameters, launches in rows)
