"""benchmarks/common/steady.py, beyond what the tests of the benchmarks that use it cover."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import torch

from benchmarks.common import steady
from benchmarks.common.steady import Steady, live_bytes


def test_windows_are_of_whole_steps_after_the_warm_up(monkeypatch):
    """Batch n ends at n^2 s of CPU time and 10 n s of wall time; each has 6 samples."""
    batch, stopped = 0, []
    clocks = SimpleNamespace(process_time=lambda: batch**2, perf_counter=lambda: 10 * batch)
    monkeypatch.setattr(steady, "time", clocks)
    measured = Steady(warm_up=2, windows=2, steps=3)
    for batch in range(1, 9):
        state = SimpleNamespace(
            device=SimpleNamespace(name="cpu"),
            timestamp=SimpleNamespace(batch=SimpleNamespace(value=batch), sample=SimpleNamespace(value=6 * batch)),
            total_loss_dict={"loss/train/total": batch / 2},
            stop_training=lambda: stopped.append(len(measured.losses)),
        )
        measured.batch_end(state, None)
    assert measured.rates == [18 / (25 - 4), 18 / (64 - 25)] and measured.by_clock == [0.6, 0.6]
    assert measured.losses == [0.5 * n for n in range(1, 9)] and stopped == [8]


def test_tensors_that_stand_for_others_have_no_memory():
    """The compiler leaves such tensors behind in a process that has compiled."""
    stand_in = torch._to_functional_tensor(torch.zeros(2))
    while gc.collect():  # what earlier tests left may only be free after several passes
        pass
    before = live_bytes()
    held = torch.zeros(1000, dtype=torch.int32)
    assert live_bytes() - before == 4000
    del held, stand_in
