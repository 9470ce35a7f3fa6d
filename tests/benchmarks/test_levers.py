"""The benchmark of levers: the same batches and noise with and without encoders, relative speeds, failed rows."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import levers, overhead
from benchmarks.common import reporting, training
from benchmarks.common.latent_sets import Encoders
from benchmarks.common.steady import Steady, largest_growth
from benchmarks.levers import RowRuns, ratio, table_rows

TINY = training.Size(
    Encoders(
        {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4},
        {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    ),
    [
        "model.denoiser.channels=[8,8,8,8]",
        "model.denoiser.heads=[1,1,1,1]",
        "model.denoiser.blocks=1",
        "model.denoiser.norm_groups=4",
        "model.denoiser.text_width=16",
    ],
    [64],
    4,
)
SHORT = ["--size", "tiny", "--rounds", "1", "--windows", "2", "--steps", "1"]


@pytest.fixture(autouse=True)
def tiny(tmp_path, monkeypatch):
    monkeypatch.setitem(training.SIZES, "tiny", TINY)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(levers, "why_no_compiler", lambda gpu: "the test has no minutes")
    return tmp_path / "results"


def test_levers_train_the_same(tiny, monkeypatch):
    build = levers.build_trainer

    def out_of_memory(recipe):
        if recipe.optimizer.args["fused"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(recipe)

    monkeypatch.setattr(levers, "build_trainer", out_of_memory)
    found = levers.main([*SHORT, "--warm-up", "3"])[64]
    names = ["baseline", "precomputed latents", "scheduled EMA", "attention", "channels_last", "lean blocks"]
    names.append("fused AdamW")
    assert list(found) == [*names, "another seed"]
    assert found.pop("fused AdamW").error == "out of memory"
    first = found["baseline"]
    for name, measured in found.items():
        assert len(measured.losses) == 5 and len(measured.rounds[0]) == 2 and measured.peak > 1e6
        # Latents are stored in 16 bits (a relative error of 2e-4); all other levers compute the same in another order.
        same = max(abs(a - b) for a, b in zip(measured.losses, first.losses, strict=True)) < 1e-3
        assert same == (name != "another seed")
    # Composer's average is a second copy of the model; the scheduled one has not begun.
    assert found["scheduled EMA"].peak < found["precomputed latents"].peak
    record = json.loads((tiny / "levers-tiny-cpu.json").read_text())
    assert [row["lever"] for row in record["rows"]] == names
    assert record["rows"][-1]["images/s"] == "out of memory"
    for words in ("Goal: precomputed latents at least 1.4x", "Not run here: torch.compile (the test", "encoding takes"):
        assert words in record["notes"]


def test_ratios_are_of_the_same_round():
    fast, slow = RowRuns([[20.0, 22.0, 21.0], [10.0, 11.0]], [1.0, 2.0]), RowRuns([[10.5], [7.0]], [1.0, 2.5])
    assert ratio(fast, slow) == (2.0 + 1.5) / 2
    broken = RowRuns(error="out of memory")
    rows = list(table_rows({"baseline": slow, "broken": broken, "fast": fast}))
    assert [row["relative to previous"] for row in rows] == [1.0, "", 1.75]  # the failed row is skipped
    assert rows[2]["loss difference"] == "-2.5e-01" and rows[2]["largest per step"] == "5.0e-01"


def test_the_flops_of_stable_diffusion_2():
    """The U-Net's published 181 GFLOP three times; 23 blocks of the text tower, 12 d^2 weights each, on 77 tokens."""
    recipe = training.recipe_with([], training.SIZES["sd2"], "set", 256, 8, None, missing=[])
    counts = training.flops(training.SIZES["sd2"], recipe, 256)
    assert round(counts["training of the U-Net"] / 3) == 181
    assert counts["text encoder"] == pytest.approx(23 * 77 * 2 * (12 * 1024**2 + 2 * 77 * 1024) / 1e9, rel=1e-3)
    small = training.recipe_with([], training.SIZES["small"], "set", 128, 8, None, missing=[])
    others = training.flops(training.SIZES["small"], small, 128)

    def share(counts):
        return (counts["VAE"] + counts["text encoder"]) / counts["training of the U-Net"]

    # The small encoders cost nearly as much relative to the network, but no more: that would favour latents.
    assert 0.8 * share(counts) < share(others) <= share(counts) < 0.6


def test_peak_memory_is_that_of_tensors():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = torch.empty(1000, 1000)
        torch.empty(2000, 1000)
        kept = torch.empty(500, 1000)
    # The third tensor is made while the first one exists, after the second one is freed.
    assert largest_growth(profiler) == 4 * 3_000_000 and kept is not None
    with pytest.raises(ValueError, match="a warm-up of 1 steps is too short"):
        Steady(1, 1, 1)


def test_a_recipe_is_compared_with_composer_in_the_same_round(tiny):
    def run(by_clock, rates):
        return SimpleNamespace(by_clock=[by_clock] * 2, rates=[rates] * 2)

    found = {overhead.OURS: [run(8.0, 9.0), run(3.0, 6.0)], overhead.PLAIN: [run(10.0, 10.0), run(5.0, 5.0)]}
    rows = overhead.write_report(found, 4, 64, SimpleNamespace(rounds=2, size="tiny"))
    names = "samples/s", "relative to Composer", "samples/s computed", "relative to Composer computed"
    assert [[row[name] for name in names] for row in rows] == [[5.5, 0.7, 7.5, 1.05], [7.5, 1.0, 7.5, 1.0]]


def test_a_recipe_compared_with_composer_alone(tiny, monkeypatch):
    build, built = overhead.build_trainer, []
    monkeypatch.setattr(overhead, "build_trainer", lambda recipe: built.append(recipe) or build(recipe))
    rows = overhead.main(["--size", "tiny", "--rounds", "1", "--windows", "2", "--steps", "1"])
    assert [row["training"] for row in rows] == [overhead.OURS, overhead.PLAIN]
    assert rows[1]["relative to Composer"] == rows[1]["relative to Composer computed"] == 1.0
    assert (tiny / "overhead-tiny-1ranks-cpu.md").is_file()
    assert built and not any(recipe.algorithms for recipe in built)  # none of them changes the network that is compared
