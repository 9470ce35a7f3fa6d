"""The number format that blocks compute in."""

import torch

from callbacks.number_format import number_format_of
from recipes.algorithms.sixteen_bit.block_scaling import scale_branch
from recipes.models.task import Task


class Blocks(Task):
    def __init__(self):
        super().__init__()
        self.branch = torch.nn.Linear(2, 2)


def test_the_format_that_blocks_compute_in(monkeypatch):
    task = Blocks()
    assert [number_format_of(task, precision) for precision in ("amp_bf16", "amp_fp16")] == ["bf16", "fp16"]
    for allowed, expected in (("highest", "fp32"), ("high", "tf32")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda allowed=allowed: allowed)
        assert number_format_of(task, "fp32") == expected
    scale_branch(task.branch, torch.ones(()), torch.zeros((), dtype=torch.int64))
    assert number_format_of(task, "fp32") == "fp16"  # by resblock_grad_scaling
