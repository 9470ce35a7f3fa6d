"""Learning rates and memory under the names that Composer's monitors gave them."""

import pytest
import torch

from callbacks.lr_monitor import LRMonitor
from callbacks.memory_monitor import STATISTICS, MemoryMonitor, memory
from tests.recipes.training.fake_run import FakeRun


def test_learning_rates_of_all_groups():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.5}, {"params": [weights[1]], "lr": 0.25}]
    run = FakeRun(optimizer=torch.optim.AdamW(groups)).at(3)
    LRMonitor().step_end(run)
    assert run.logged == [(3, {"lr-AdamW/group0": 0.5, "lr-AdamW/group1": 0.25})]


def test_memory_in_gigabytes_of_five_digits(monkeypatch):
    stats = dict.fromkeys(STATISTICS, 0) | {
        "allocated_bytes.all.current": 12_345_678_901,
        "reserved_bytes.all.peak": 987_654_321,
        "active_bytes.all.current": 4_096,
        "num_alloc_retries": 3,
        "other": 5,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    run = FakeRun().at(2)
    run.device = torch.device("cuda", 0)
    callback = MemoryMonitor()
    callback.begin(run)
    callback.gradients_ready(run)
    ((batch, figures),) = run.logged
    assert batch == 2 and len(figures) == 9 and all(name.startswith("memory/") for name in figures)
    assert figures["memory/current_allocated_mem"] == 12.346
    assert figures["memory/peak_reserved_mem"] == 0.98765
    assert figures["memory/current_active_mem"] == pytest.approx(4.096e-6, rel=1e-12)
    assert figures["memory/peak_inactive_mem"] == 0 and figures["memory/alloc_retries"] == 3
    assert memory({"num_alloc_retries": 1}) == {"alloc_retries": 1}


def test_a_cpu_has_nothing_to_log(capsys):
    run, callback = FakeRun(), MemoryMonitor()
    callback.begin(run)
    callback.gradients_ready(run)
    assert run.logged == []
    line = "memory_monitor: this run is on a CPU, so there is no GPU memory to log\n"
    assert capsys.readouterr().out == line
