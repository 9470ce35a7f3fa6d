"""Ways to divide training on two ranks: those of the benchmark are right, and wrong ones are found."""

import json
from pathlib import Path

import pytest

from benchmarks.divided_training import ways
from tests.benchmarks.divided_training_ranks import WRONG
from tests.ranks import launch

RANKS = Path(__file__).with_name("divided_training_ranks.py")
# One of each kind: that all of them are right is the subject of other tests.
RIGHT = ["DDP, Lightning", "block_all_reduce, Lightning", "SHARD_GRAD_OP, L", "two replicas", "tensor_parallel 2, seq"]


@pytest.mark.slow
def test_two_ranks(tmp_path):
    only = ["--only", *RIGHT, *(way.name for way in WRONG)]
    sizes = ["--models", "transformer", "--precisions", "fp32", "--steps", "3"]
    done = launch(2, RANKS, tmp_path, *sizes, *only)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-6000:]
    assert f"divided_training: {len(WRONG)} comparisons failed" in done.stderr
    rows = json.loads((tmp_path / "divided_numbers-2ranks-cpu.json").read_text())["rows"]
    results = {row["way"]: row for row in rows}
    right = [way.name for way in ways(2) if way.name.startswith(tuple(RIGHT)) and not way.gpu]
    assert list(results) == right + [way.name for way in WRONG] and len(right) == len(RIGHT)
    assert {results[name]["result"] for name in right} == {"passed"}
    clipped, doubled, apart, impossible = (results[way.name] for way in WRONG)
    assert clipped["result"] == doubled["result"] == apart["result"] == "FAILED"
    assert (clipped["ranks"], doubled["ranks"], apart["ranks"]) == ("alike", "alike", "DIFFER")
    assert float(doubled["weights' relative difference"]) > 0.1
    assert "tensor_parallel: 3" in impossible["result"]
    rates = json.loads((tmp_path / "divided_rates-small-2ranks-cpu.json").read_text())["rows"]
    assert [row["way"] for row in rates] == [way.name for way in ways(2) if way.name in right and way.rate]
    assert all(row["rate"] > 0 for row in rates) and len(rates) == 2


def test_ways_are_those_of_the_devices():
    names = {world: [way.name for way in ways(world) if world % way.multiple == 0] for world in (1, 2, 4, 6)}
    assert names[1][0] == "one device" and not any("DDP" in name or "replica" in name for name in names[1])
    assert "CUDA graphs" in names[1] and "CUDA graphs, block_all_reduce" in names[2]
    assert "FULL_SHARD, two replicas" in names[4] and "FULL_SHARD, two replicas" not in names[2] + names[6]
    tensor = {world: next(way for way in ways(world) if way.name == "tensor_parallel 2") for world in (2, 4)}
    assert tensor[2].changes == ("training.tensor_parallel=2",)  # alone; more groups need FSDP
    assert tensor[4].changes == ("training.tensor_parallel=2", "training.fsdp={}")
