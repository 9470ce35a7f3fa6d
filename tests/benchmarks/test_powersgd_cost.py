"""The benchmark of PowerSGD's computation: the published shards and their compression, and one run."""

import pytest
import torch

from benchmarks import powersgd_cost, reporting
from benchmarks.powersgd_cost import published_shard_shapes
from recipes.algorithms.powersgd.low_rank import LowRank
from recipes.models.autoregressive.masks import TokenLayout


@pytest.mark.parametrize(("width", "rank", "saved"), [(1920, 512, 83), (2688, 640, 85), (3968, 896, 86)])
def test_the_published_shards_save_the_published_share(width, rank, saved):
    shapes = published_shard_shapes(width, 8)
    numbers = sum(shape.numel() for shape in shapes)
    assert numbers == 12 * width**2 // 8
    share = LowRank(rank // 8).bytes_sent(shapes, 2) / (2 * numbers)
    assert share == pytest.approx(5 * rank / (8 * width))
    assert round(100 * (1 - share)) == saved


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
