"""Recipes with many levers, callbacks and loggers run alike under both engines, and resume under Lightning."""

from multiprocessing import active_children
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.comparison.events import read_curves
from recipes.config.recipe import Recipe, load_config
from tests.recipes.engines.recording import assert_bit_equal, record

ROOT = Path(__file__).resolve().parents[3]
RUN = [
    "training={duration: 9ba, global_batch: 8, microbatch: 3, precision: auto, device: cpu, eval_every: 4ba}",
    "checkpoints={every: 6ba, keep: -1, autoresume: false}",
    "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 3ba}",
    "loggers={tensorboard: {name: tensorboard}}",
    "callbacks.memory_monitor=null",  # it warns without a GPU
]
DIFFUSION = [
    "algorithms.low_precision_norms=null",  # a run in fp32 has no autocast
    "algorithms.fused_group_norm=null",
    "algorithms.activation_checkpointing={name: activation_checkpointing, every: 2}",
    "training.grad_clip=1.0",
    "callbacks.progress.seconds=0",
    "callbacks.export={name: export, every: 4ba}",
    "callbacks.sample_grid={name: sample_grid, every: 4ba, prompts: [a dot, a star], steps: 2, batch: 2}",
]
AUTOREGRESSIVE = [
    "model={layers: 2, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "data={resolution: 32, positions: 16, workers: 1}",
    "evals.val={resolution: 32, positions: 16, workers: 0}",
    "optimizer={name: adam16, lr: 3e-3, compiled: false}",
    "schedule={name: plateau, warmup: 2ba, window: 3, patience: 1}",
    "algorithms.resblock_grad_scaling={name: resblock_grad_scaling}",
    "callbacks.token_grid={name: token_grid, every: 4ba, prompts: [a dot, a star], batch: 2}",
    "callbacks.gradient_scales={name: gradient_scales, every: 4ba}",
    "callbacks.exponents={name: exponents, every: 4ba}",
    "callbacks.export.every=4ba",
    "callbacks.progress.seconds=0",
]
DVAE = [
    "model={codes: 32, hidden: 8, blocks: 1, initial: 8}",
    "data={resolution: 16, workers: 0, filter: null}",
    "evals.val={resolution: 16, filter: null}",
    "callbacks={beta: {over: 4ba}, temperature: {over: 8ba}, reconstructions: {every: 4ba, pictures: 4}}",
    "callbacks.export.every=4ba",
    "schedule={final: 0.1, over: 8ba}",
]


@pytest.fixture(params=["diffusion", "autoregressive", "dvae"])
def recipe_of(request):
    """(output, overrides) -> a small recipe."""
    if request.param == "diffusion":
        small_recipe = request.getfixturevalue("small_recipe")
        return lambda output, *overrides: small_recipe(output, *RUN, *DIFFUSION, *overrides)
    if request.param == "autoregressive":
        token_recipe = request.getfixturevalue("token_recipe")
        return lambda output, *overrides: token_recipe(output, *RUN, *AUTOREGRESSIVE, *overrides)
    tars = request.getfixturevalue("drawings")
    paths = [f"data.source.urls={tars}/train/*.tar", f"evals.val.source.urls={tars}/val/*.tar"]

    def make(output, *overrides):
        return load_config(ROOT / "yamls" / "dvae.yaml", [*RUN, *DVAE, *paths, f"output={output}", *overrides], Recipe)

    return make


def written(output):
    """Files besides checkpoints and events; scalars by name, as (batch, value); names of images."""
    files = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    own = {file for file in files if not file.startswith(("checkpoints/", "tensorboard/"))}
    (file,) = (output / "tensorboard").rglob("events*")  # a single one, however often it is flushed
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return own, scalars, set(events.Tags()["images"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_charts")
def test_both_engines_do_the_same(recipe_of, tmp_path):
    found, before = {}, set(active_children())
    for engine in ("composer", "lightning"):
        found[engine] = record(engine, recipe_of(tmp_path / engine, f"training.engine={engine}"))
    assert_bit_equal(found["composer"], found["lightning"])
    assert set(active_children()) <= before

    files, scalars, images = written(tmp_path / "composer")
    lightning_files, lightning_scalars, lightning_images = written(tmp_path / "lightning")
    assert lightning_files == files and len(files) > 3
    assert lightning_images == images and images
    assert set(lightning_scalars) == set(scalars)
    exact = [name for name in scalars if name.startswith(("loss/", "metrics/", "lr-", "gradient/", "time/batch"))]
    assert len(exact) > 3
    for name in exact:
        assert lightning_scalars[name] == scalars[name], name

    for engine in found:  # as the page of recipes/compare.py reads them
        curves = read_curves(tmp_path / engine / "tensorboard")
        for name in (name for name in exact if name.startswith(("loss/", "metrics/", "lr-"))):
            read = zip(curves[name].batches.tolist(), curves[name].values.tolist(), strict=True)
            assert list(read) == scalars[name], name

    (checkpoint,) = (tmp_path / "lightning" / "checkpoints").glob("*-ba6.ckpt")
    resumed = record("lightning", recipe_of(tmp_path / "resumed", f"checkpoints.load_path={checkpoint}"))
    assert len(resumed.losses) == 3
    assert_bit_equal(found["lightning"], resumed)
