"""The memory of passes against sums by hand, and lines against passes of other numbers of samples."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.planning.batches import blank_batch, traced_model
from recipes.planning.tracing.levers import apply_levers
from recipes.planning.tracing.pass_memory import FACTOR, FEWEST, Interval, PassMemory, follow, passes_of

ROOT = Path(__file__).resolve().parents[4]
SMALL = ["model.denoiser={channels: [32, 32], attention: [true, false], heads: [1, 1]}", "data.resolution=64"]
N = 1000  # samples of `Layers`, with which all but activations is small


class Layers(nn.Module):
    """x -> linear -> tanh -> linear -> sum; the first two layers are what recomputation covers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh())
        self.last = nn.Linear(16, 4, bias=False)

    def forward(self, batch):
        return {"total": self.last(self.first(batch["x"])).sum()}

    def recomputed_blocks(self):
        return [self.first]


def layers():
    with torch.device("meta"):
        return Layers().to(torch.bfloat16)


def batch(samples):
    return {"x": torch.empty(samples, 8, device="meta", dtype=torch.bfloat16)}


def test_the_peak_has_what_is_kept_and_the_gradients_that_pass_through():
    forward, last, first, after = follow(layers(), batch(N))
    values = [interval.complete for interval in (forward, last, first, after)]
    assert values == [0, 0, 4 * 16, 4 * 16 + 16 * 8]
    # x and the result of tanh are kept. The input of tanh is there with its result.
    assert forward.highest == pytest.approx(2 * N * (8 + 16 + 16), rel=0.02)
    # The gradient of tanh's result, and then that of its input beside it, while x and the result are there.
    assert last.highest == pytest.approx(2 * N * (8 + 16 + 16), rel=0.02)
    assert first.highest == pytest.approx(2 * N * (8 + 16 + 16 + 16), rel=0.02)
    assert after.highest <= 2 * N * (8 + 16) * 1.02


def test_recomputed_activations_are_there_in_the_backward_pass_only():
    kept, recomputed = follow(layers(), batch(N)), follow(layers(), batch(N), recomputed=True)
    task = layers()
    follow(task, batch(N), recomputed=True)
    assert "forward" not in vars(task.first)  # it is as it was
    assert [i.complete for i in kept] == [i.complete for i in recomputed]
    deep = Deep(8)  # each block keeps 8 values per sample in place of 80
    plain, again = (max(i.highest for i in follow(deep, batch(N), way)) for way in (False, True))
    assert again < plain / 2


class Repeated(Layers):
    """Names a block twice, which has a forward of its own."""

    def __init__(self):
        super().__init__()
        self.first.forward = partial(nn.Sequential.forward, self.first)

    def recomputed_blocks(self):
        return [self.first, self.first]


def test_forwards_of_blocks_are_as_they_were():
    with torch.device("meta"):
        task = Repeated().to(torch.bfloat16)
    before = task.first.forward
    follow(task, batch(N), recomputed=True)
    assert task.first.forward is before


class Deep(nn.Module):
    """Blocks of two tanh."""

    def __init__(self, count):
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh()) for _ in range(count)
            ).to(torch.bfloat16)

    def forward(self, batch):
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return {"total": x.sum()}

    def recomputed_blocks(self):
        return list(self.blocks)


def test_gradients_that_come_one_by_one_take_the_place_of_activations():
    low = [Interval(100, 0), Interval(80, 10), Interval(0, 30)]
    high = [Interval(100 + 31, 0), Interval(80 + 62, 10), Interval(0, 30)]  # slopes of 1 and 2 per sample
    memory = PassMemory(1, low, [*high])
    assert memory.gradients == 30
    assert memory.peak(1) == 100 and memory.peak(1, 4) == 80 + 40 and memory.peak(1, 40) == 30 * 40
    assert memory.peak(11) == 110 and memory.peak(41) == 160  # the second one is the highest from 21 samples on
    assert memory.peak(1, copies=(7, 9)) == 107 and memory.peak(1, copies=(7, 29)) == 109
    with pytest.raises(ValueError, match="order of gradients"):
        PassMemory(1, low, high[:2])


def model(name, changes):
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", changes, Recipe, [])
    task = build_on_meta(traced_model(recipe))
    apply_levers(recipe, task)
    return recipe, task


TOKENS = "layers: 4, width: 32, heads: 4, text_positions: 64, text_vocabulary: 4000, side: 8, codes: 64"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sd2_base", SMALL),
        ("dalle_1b", [f"model={{{TOKENS}}}"]),
        ("gpt2_1b", ["model={layers: 2, width: 32, heads: 2, positions: 128, vocabulary: 3000}"]),
        ("openmoji_diffusion", []),
    ],
)
def test_any_number_of_samples_follows_from_two(name, changes):
    """A plan must not be too low; between the two numbers it may be a little too high."""
    recipe, task = model(name, changes)
    passes = passes_of(task, lambda samples: blank_batch(recipe, task, samples))
    few = passes.kept.few
    assert few >= FEWEST
    for samples in (few, 3 * few, 11 * few, FACTOR * few):
        for again, found in ((False, passes.kept), (True, passes.recomputed)):
            direct = PassMemory(few, *2 * [follow(task, blank_batch(recipe, task, samples), again)])
            for per_gradient in (0, 4):
                exact = direct.peak(samples, per_gradient)
                assert exact * 0.999 <= found.peak(samples, per_gradient) <= exact * 1.03


def test_logits_are_counted_for_the_rows_that_a_loss_takes_at_once():
    sizes = "layers: 1, width: 16, heads: 2, positions: 128"

    def peak(vocabulary):
        recipe, task = model("gpt2_1b", [f"model={{{sizes}, vocabulary: {vocabulary}}}"])
        return passes_of(task, lambda samples: blank_batch(recipe, task, samples)).kept.peak(256)

    # Of 4,096 rows: logits and likelihoods in 32 bits, slopes of the chunk before in 16.
    assert peak(4000) - peak(2000) == pytest.approx(4096 * 2000 * (4 + 4 + 2), rel=0.05)
