"""Composer and Lightning train alike: the same losses, weights, averages and validation, also after a resume and when a
run goes on under the other engine."""

import functools
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from data.encoded.dataset import EncodedDataset
from recipes.config.recipe import to_yaml
from recipes.engines.checkpoints.conversion import convert
from recipes.training.callback import Callback
from recipes.training.checkpoint_names import KINDS
from tests.ranks import launch
from tests.recipes.engines.recording import Recorder, assert_bit_equal, record

BATCHES, MIDDLE = 26, 13  # batch 13 is within an epoch of 5, after the average has begun
# Largest difference of losses, weights, averages, moments and figures of validation over two ranks. On one machine it
# has always been 0; ranks of another machine may add gradients in another order.
TOLERANCE = 1e-6
COMMON = [
    f"training={{duration: {BATCHES}ba, global_batch: 8, microbatch: 3, eval_every: 11ba, grad_clip: 0.5}}",
    "training.device=cpu",
    f"checkpoints={{every: {MIDDLE}ba, keep: -1}}",
    "loggers={}",
]
DIFFUSION = [
    "algorithms={attention: null, channels_last: null, low_precision_norms: null, fused_group_norm: null}",
    "algorithms.scheduled_ema={name: scheduled_ema, half_life: 6ba, start: 10ba}",
    "callbacks={progress: null, throughput: null, lr_monitor: null, memory_monitor: null, sample_grid: null}",
    "callbacks.export=null",
    "data={caption_dropout: 0.3, flip: 0.3}",
    "schedule={name: cosine, warmup: 5ba, final: 0.1}",
    "optimizer.decay_vectors=false",  # two groups of parameters
]
AUTOREGRESSIVE = [
    "model={layers: 2, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "data={resolution: 32, positions: 16, caption_dropout: 0.3, workers: 0}",
    "evals.val={resolution: 32, positions: 16, workers: 0}",
    "optimizer.lr=3e-3",
    "schedule={name: plateau, warmup: 2ba, window: 3, patience: 1}",  # it has a state of its own
    "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 10ba}",
    "callbacks={progress: null, throughput: null, lr_monitor: null, unigram: null, token_grid: null, export: null}",
]


@pytest.fixture(scope="module")
def recipes(quick_recipe, token_recipe):
    """Kind -> (output, overrides) -> a small recipe with accumulation over uneven microbatches, clipping, an average
    that begins late, caption dropout and validation."""

    def diffusion(output, *overrides):
        return quick_recipe(output, *COMMON, *DIFFUSION, *overrides)

    def autoregressive(output, *overrides):
        return token_recipe(output, *COMMON, *AUTOREGRESSIVE, *overrides)

    return {"diffusion": diffusion, "autoregressive": autoregressive}


@pytest.fixture(scope="module", params=["diffusion", "autoregressive"])
def recipe_of(request, recipes):
    """The recipe of one kind, see `recipes`."""
    return recipes[request.param]


@pytest.fixture(scope="module")
def whole(recipe_of, tmp_path_factory):
    """Each engine's run without a stop: engine -> (output, what was recorded)."""
    outputs = {engine: tmp_path_factory.mktemp("whole") / engine for engine in ("composer", "lightning")}
    return {engine: (output, record(engine, recipe_of(output))) for engine, output in outputs.items()}


def checkpoint(output):
    """The one of the middle."""
    return next(path for path in (output / "checkpoints").iterdir() if f"-ba{MIDDLE}" in path.name)


def test_one_rank_is_bit_equal(whole):
    composer, lightning = whole["composer"][1], whole["lightning"][1]
    assert len(composer.losses) == len(lightning.losses) == BATCHES
    assert len(composer.evals) == len(lightning.evals) == 3 and len(composer.epochs) == len(lightning.epochs)
    assert len(set(composer.digests)) > BATCHES - 2 and len(set(composer.rates)) > 1  # the first rate is 0
    assert_bit_equal(composer, lightning)


@pytest.mark.parametrize("recipe_of", ["autoregressive"], indirect=True)
@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_the_size_of_microbatches_does_not_matter(whole, recipe_of, tmp_path, engine):
    """Captions differ in length and some are empty, so that microbatches of 3, 3 and 2 have different numbers of
    tokens."""
    other = record(engine, recipe_of(tmp_path, "training.microbatch=null", "training.duration=12ba"))
    # Only the order of additions differs. Adam's first steps enlarge the differences of small gradients.
    assert other.losses == pytest.approx(whole[engine][1].losses[:12], rel=1e-4)


def test_a_resume_in_the_middle_changes_nothing(whole, recipe_of, tmp_path):
    output, uninterrupted = whole["lightning"]
    resumed = record("lightning", recipe_of(tmp_path, f"checkpoints.load_path={checkpoint(output)}"))
    assert len(resumed.losses) == BATCHES - MIDDLE
    assert_bit_equal(uninterrupted, resumed)


@pytest.mark.parametrize(("engine", "other"), [("composer", "lightning"), ("lightning", "composer")])
def test_a_run_goes_on_under_the_other_engine(whole, recipe_of, tmp_path, engine, other):
    output, uninterrupted = whole[engine]
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    converted = convert(Path(shutil.copy(checkpoint(output), folder)), other)
    assert converted.parent == folder
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        crossed = record(other, recipe_of(tmp_path, "checkpoints.autoresume=true"))
    assert not [warning for warning in warned if "is not in the state_dict" in str(warning.message)]
    assert len(crossed.losses) == BATCHES - MIDDLE
    assert_bit_equal(uninterrupted, crossed)


class Samples(Callback):
    """Keeps the numbers of the samples of each epoch, the share of the run that is done, and learning rates."""

    def __init__(self):
        self.epochs, self.shares, self.rates = [[]], [], []

    def batch_start(self, run):
        self.epochs[-1] += run.batch["seed"].tolist()
        self.shares.append(run.clock.share)
        self.rates.append(run.optimizer.param_groups[0]["lr"])

    def epoch_end(self, run):
        self.epochs.append([])


# Of these runs, nothing but the samples and their places in the run is looked at.
SAMPLES = ["algorithms.scheduled_ema=null", "training={microbatch: null, eval_every: null}", "evals.val=null"]
SAMPLES += ["checkpoints.autoresume=true"]
OTHER_BATCHES = [*SAMPLES, "schedule={name: linear, warmup: 0ba, final: 0.0}", "optimizer.lr=1e-3"]


@pytest.fixture(scope="module")
def begun(recipes, tmp_path_factory):
    """Engine -> (output, samples) of a run of 4 batches of 4, which others go on from in copies of its folder."""

    @functools.cache
    def run(engine):
        output = tmp_path_factory.mktemp("begun") / engine
        recipe = recipes["diffusion"](output, *OTHER_BATCHES, "training={duration: 4ba, global_batch: 4}")
        return output, record(engine, recipe, Samples()).epochs[0]

    return run


@pytest.mark.parametrize("engine", ["composer", "lightning"])
@pytest.mark.parametrize(("global_batch", "left"), [(8, 24), (16, 16), (10, 20)])
def test_a_run_goes_on_with_other_batches_and_the_rest_of_its_epoch(
    recipes, begun, tmp_path, engine, global_batch, left
):
    output, seen = begun(engine)
    shutil.copytree(output, tmp_path, symlinks=True, dirs_exist_ok=True)
    change = [f"training={{duration: 2ep, global_batch: {global_batch}}}", "checkpoints.allow_changes=[training]"]
    samples = record(engine, recipes["diffusion"](tmp_path, *OTHER_BATCHES, *change), Samples())
    rest, whole, _ = samples.epochs
    assert len(seen) == 16 and len(rest) == left and len(whole) == 40 - 40 % global_batch
    assert len({*seen, *rest}) == 16 + left
    batches = 4 + left // global_batch + 40 // global_batch
    assert samples.shares == [batch / batches for batch in range(4, batches)]
    # Composer sets the rate of a step before it counts the one before it.
    before = [3 / batches, *samples.shares[:-1]]
    assert samples.rates == pytest.approx([1e-3 * (1 - share) for share in before])


def epochs_of(recipes, output, engine, length):
    recipe = recipes["diffusion"](output, *SAMPLES, "checkpoints.every=1ep", f"training.duration={length}ep")
    return record(engine, recipe, Samples()).epochs[:-1]


@pytest.fixture(scope="module")
def of_three(recipes, tmp_path_factory):
    """Engine -> (epochs of a run of three, that of a run of one, its output, in copies of which others go on)."""

    @functools.cache
    def run(engine):
        output = tmp_path_factory.mktemp("one") / engine
        whole = epochs_of(recipes, tmp_path_factory.mktemp("three") / engine, engine, 3)
        return whole, epochs_of(recipes, output, engine, 1), output

    return run


@pytest.mark.parametrize(
    ("engine", "other"), [("composer", "composer"), ("lightning", "lightning"), ("lightning", "composer")]
)
def test_a_run_goes_on_from_the_end_of_an_epoch_with_the_next_one(recipes, of_three, tmp_path, engine, other):
    whole, first, output = of_three(engine)
    parts = shutil.copytree(output, tmp_path / "parts", symlinks=True)
    if other != engine:
        convert(parts / "checkpoints" / KINDS[engine].link, other)
    assert first + epochs_of(recipes, parts, other, 2) + epochs_of(recipes, parts, other, 3) == whole


@pytest.mark.parametrize(
    ("engine", "size"),
    [("composer", "streams.train.repeat=2.5"), ("lightning", "epoch_size=24"), ("composer", "shuffle_algo=py2s")],
)
def test_a_run_goes_on_in_an_epoch_that_is_not_the_set_once(recipes, tmp_path, engine, size):
    """Engines do not know why it is not, nor does the data know engines."""

    def epochs(name, batches):
        recipe = recipes["diffusion"](tmp_path / name, *SAMPLES, f"data.{size}", f"training.duration={batches}ba")
        return record(engine, recipe, Samples()).epochs

    first, rest, whole = epochs("parts", 2), epochs("parts", 14), epochs("whole", 14)
    assert [first[0] + rest[0], *rest[1:]] == whole


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_run_goes_on_with_fewer_samples_than_it_has_seen(recipes, tmp_path, engine):
    record(engine, recipes["diffusion"](tmp_path, *SAMPLES, "training.duration=4ba"), Samples())
    change = ["data.epoch_size=16", "checkpoints.allow_changes=[data]", "training.duration=6ba"]
    epochs = record(engine, recipes["diffusion"](tmp_path, *SAMPLES, *change), Samples()).epochs
    (whole,) = filter(None, epochs)
    assert len(whole) == len(set(whole)) == 16


def test_every_validation_set_has_figures_of_its_own(recipes, latent_sets, tmp_path):
    seen = f"{{name: latents, streams: {{s: {{name: local, path: {latent_sets}/train}}}}, resolution: 16, workers: 0}}"
    always = ["algorithms.scheduled_ema=null", "training.duration=2ba", f"evals.seen={seen}"]
    composer, lightning = (
        record(engine, recipes["diffusion"](tmp_path / engine, *always)).evals for engine in ("composer", "lightning")
    )
    assert composer == lightning and [label for _, label, _ in lightning] == ["val", "seen"]
    assert lightning[0][2]["loss"] != lightning[1][2]["loss"]


def test_samples_of_validation_count_by_their_weights(recipes, tmp_path, monkeypatch):
    """They are not 1 where ranks have a sample more than once."""
    always = ["algorithms.scheduled_ema=null", "training.duration=1ba"]

    def evals(name, engine):
        return record(engine, recipes["diffusion"](tmp_path / name, *always)).evals

    plain = evals("plain", "lightning")
    monkeypatch.setattr(EncodedDataset, "weights", lambda *_: np.array([1, 0, 0.5, 1, 0, 0.25], dtype=np.float32))
    found = evals("composer", "composer"), evals("lightning", "lightning")
    assert found[0] == found[1] and found[0][0][2]["loss"] != plain[0][2]["loss"]


def saved_states(recorder):
    """What a checkpoint at the end of the run would hold of its callbacks."""
    return {name: callback.state_dict() for name, callback in recorder.callbacks.items() if name != "recorder"}


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_callbacks_go_on_with_what_they_have_counted(recipes, tmp_path, engine, checkpoints):
    overrides = [
        "training={duration: 4ba, eval_every: null}",
        f"training.fsdp={{checkpoints: {checkpoints}}}",
        "checkpoints={every: 2ba, keep: -1}",
        "optimizer={name: adam16, lr: 3e-3, compiled: false}",
        "algorithms={scheduled_ema: null, resblock_grad_scaling: {name: resblock_grad_scaling, start: 24.0}}",
        "callbacks={gradient_scales: {name: gradient_scales}, unigram: {name: unigram}}",
    ]
    whole = record(engine, recipes["autoregressive"](tmp_path / "whole", *overrides))
    path = next(path for path in (tmp_path / "whole" / "checkpoints").iterdir() if "-ba2" in path.name)
    more = [f"checkpoints.load_path={path}", "callbacks.exponents={name: exponents, every: 3ba}"]  # is in no checkpoint
    rest = record(engine, recipes["autoregressive"](tmp_path / "rest", *overrides, *more))
    states, expected = saved_states(rest), saved_states(whole)
    seen = states["unigram"]["seen"]
    assert seen.sum() == 4 * 8 * 16 and seen.equal(expected["unigram"]["seen"])
    assert states["gradient_scales"] == expected["gradient_scales"]
    assert any(row["nonfinite"] for row in states["gradient_scales"]["rows"])


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_two_callbacks_of_a_kind_have_a_state_each(recipes, tmp_path, engine):
    overrides = ["training={duration: 4ba, eval_every: null}", "checkpoints.every=2ba", "algorithms.scheduled_ema=null"]
    overrides += [f"callbacks.every_{n}={{name: exponents, every: {n}ba}}" for n in (2, 3)]
    record(engine, recipes["autoregressive"](tmp_path / "whole", *overrides))
    path = next(path for path in (tmp_path / "whole" / "checkpoints").iterdir() if "-ba2" in path.name)
    other = "lightning" if engine == "composer" else "composer"
    for goes_on, load in ((engine, path), (other, convert(Path(shutil.copy(path, tmp_path)), other))):
        rest = tmp_path / goes_on
        record(goes_on, recipes["autoregressive"](rest, *overrides, f"checkpoints.load_path={load}"))
        assert [file.stem for file in sorted(rest.glob("exponents/*.png"))] == ["ba0000002", "ba0000003"]


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_run_from_another_runs_checkpoint_has_its_own_rates(recipes, tmp_path, engine):
    overrides = ["training={duration: 4ba, eval_every: null}", "checkpoints.every=2ba", "algorithms.scheduled_ema=null"]
    overrides += ["schedule={name: constant, warmup: 8ba}", "optimizer={lr: 1e-3, betas: [0.9, 0.98]}"]
    overrides += ["optimizer.decay_vectors=true"]  # one group of parameters
    whole = record(engine, recipes["diffusion"](tmp_path / "whole", *overrides))
    path = next(path for path in (tmp_path / "whole" / "checkpoints").iterdir() if "-ba2" in path.name)
    seen = []
    other = ["optimizer={lr: 1e-4, betas: [0.8, 0.9], decay_vectors: false}", f"checkpoints.load_path={path}"]

    class Watch(Recorder):
        def step_end(self, run):
            super().step_end(run)
            seen.append([(*group["betas"], group["weight_decay"]) for group in run.optimizer.param_groups])

    rest = record(engine, recipes["diffusion"](tmp_path / "rest", *overrides, *other), Watch())
    assert rest.rates == pytest.approx([rate / 10 for rate in whole.rates[2:]])
    assert seen == [[(0.8, 0.9, 0.01), (0.8, 0.9, 0.0)]] * 2


def test_a_callback_may_have_the_label_of_a_schedule_that_watches_the_run(recipes, tmp_path):
    overrides = ["training.duration=1ba", "algorithms.scheduled_ema=null", "callbacks.schedule={name: lr_monitor}"]
    callbacks = record("lightning", recipes["autoregressive"](tmp_path, *overrides)).callbacks.values()
    assert {"LRMonitor", "Plateau"} <= {type(callback).__name__ for callback in callbacks}


@pytest.mark.slow
def test_two_ranks_are_equal_within_a_tolerance(recipes, tmp_path):
    short = ["training.duration=8ba", "training.global_batch=10", "training.eval_every=4ba", "checkpoints.every=4ba"]
    ema = "algorithms.scheduled_ema={name: scheduled_ema, half_life: 4ba, start: 3ba}"
    low_rank = [
        "training={duration: 6ba, grad_clip: null}",
        "algorithms.powersgd={name: powersgd, rank: 4, clip: 1.0}",
        "algorithms.resblock_grad_scaling={name: resblock_grad_scaling}",
        "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 2ba}",
        "optimizer={name: adam16, lr: 3e-3, compiled: false}",
    ]
    for name, recipe in {
        "recipe": recipes["diffusion"](tmp_path / "none", *short, ema),
        "low_rank": recipes["autoregressive"](tmp_path / "none", *short, *low_rank),
    }.items():
        (tmp_path / f"{name}.yaml").write_text(to_yaml(recipe))
    done = launch(2, Path(__file__).with_name("equality_ranks.py"), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((tmp_path / "differences.json").read_text())
    batches = {"ddp": 8, "fsdp": 8, "powersgd": 6, **{f"block_all_reduce, {e}": 8 for e in ("composer", "lightning")}}
    assert len(found) == 10
    for name, figures in found.items():
        assert figures.pop("batches") == batches.get(name, 4)
        assert max(figures.values()) <= TOLERANCE, (name, figures)
