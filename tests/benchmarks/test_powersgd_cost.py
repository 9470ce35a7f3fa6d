"""The benchmark of PowerSGD's computation: one run, and what is refused."""

import pytest
import torch

from benchmarks import powersgd_cost
from benchmarks.common import reporting
from recipes.models.autoregressive.masks import TokenLayout


def test_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(powersgd_cost, "LAYOUT", TokenLayout(8, 4, 3))
    (row,) = powersgd_cost.main(["--widths", "64", "--ranks", "16", "--rounds", "1"])
    assert sum(isinstance(value, float) for value in row.values()) == 10
    (page,) = tmp_path.glob("powersgd_cost-d64-*.md")
    assert "16 (2 per shard)" in page.read_text()
    assert torch.distributed.is_initialized() is False or torch.distributed.get_world_size() == 1


@pytest.mark.parametrize("arguments", [["--widths", "64", "128", "--ranks", "8"], ["--widths", "72", "--ranks", "8"]])
def test_what_does_not_fit_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        powersgd_cost.main(arguments)
    assert "--ranks: 1 for 2 widths" in (said := capsys.readouterr().err) or "72 is not a multiple" in said
