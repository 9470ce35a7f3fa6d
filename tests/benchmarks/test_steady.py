"""benchmarks/steady.py, beyond what the tests of the benchmarks that use it cover."""

from __future__ import annotations

import torch

from benchmarks.steady import live_bytes


def test_tensors_that_stand_for_others_have_no_memory():
    """The compiler leaves such tensors behind in a process that has compiled."""
    stand_in = torch._to_functional_tensor(torch.zeros(2))
    before = live_bytes()
    held = torch.zeros(1000, dtype=torch.int32)
    assert live_bytes() - before == 4000
    del held, stand_in
