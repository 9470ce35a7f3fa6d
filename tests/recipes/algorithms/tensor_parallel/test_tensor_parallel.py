"""The divided model equals the whole one: four ranks in one launch."""

import json
from pathlib import Path

import pytest

from recipes.config.recipe import Recipe, load_config, to_yaml
from tests.ranks import launch
from tests.recipes.algorithms.sharding.first_rank_ranks import TENSOR
from tests.recipes.engines.shipped import PATHS, TEXTS

ROOT = Path(__file__).resolve().parents[4]
SMALL = [
    "model={layers: 2, width: 32, heads: 4, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "data={resolution: 32, positions: 16, workers: 0}",
    "evals.val={resolution: 32, positions: 16, workers: 0}",
    "training={duration: 4ba, global_batch: 8, microbatch: 2, eval_every: null, grad_clip: 0.5, device: cpu}",
    "schedule={name: cosine, warmup: 1ba, final: 0.1}",
    "optimizer={name: adam16, lr: 3e-3, compiled: false}",
    "checkpoints={every: 2ba, keep: -1, autoresume: false}",
    "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.5, start: 1ba}",
    "algorithms.activation_checkpointing={name: activation_checkpointing}",
    "callbacks={unigram: null, progress: null, lr_monitor: null, token_grid: null}",
    "callbacks.export.every=null",
    "loggers={}",
]
SMALL_TEXT = [
    *TEXTS,
    "training={duration: 2ba, global_batch: 8, microbatch: 2, eval_every: null, device: cpu}",
    "optimizer.lr=3e-3",
    "checkpoints={every: 1ba, keep: -1, autoresume: false}",
    "callbacks={unigram: null, progress: null, throughput: null, lr_monitor: null, memory_monitor: null, export: null}",
    "loggers={}",
]
SMALL_DIT = [
    "model.denoiser={heads: 4, layers: 1, text_layers: 1}",
    "training={duration: 4ba, microbatch: 2, grad_clip: 0.5, fsdp: {checkpoints: sharded}}",
    "checkpoints={every: 2ba, keep: -1}",
    "algorithms={noise_of_samples: {name: noise_of_samples}, ema: {name: scheduled_ema, decay: 0.5, start: 1ba}}",
    "callbacks={sample_grid: {name: sample_grid, every: 4ba, prompts: [a, b], steps: 2}, export: {name: export}}",
    "callbacks.export.every=null",
]


@pytest.fixture(scope="module")
def four_ranks(token_sets, text_sets, quick_recipe, tmp_path_factory):
    """A check's name -> what the ranks reported of it."""
    folder = tmp_path_factory.mktemp("four_ranks")
    recipes = {
        "autoregressive": ("openmoji_dalle", SMALL, "token_sets", token_sets),
        "language 2": ("gpt2_2b", SMALL_TEXT, "text_sets", text_sets),
        "language 4": ("gpt2_4b", [*SMALL_TEXT, "training.fsdp=null"], "text_sets", text_sets),
    }
    files = {}
    for model, (name, changes, kind, sets) in recipes.items():
        paths = [path.format(sets) for path in PATHS[kind]]
        recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [*changes, *paths], Recipe)
        files[model] = str(folder / f"{name}.yaml")
        Path(files[model]).write_text(to_yaml(recipe))
    files["dit"] = str(folder / "dit.yaml")
    Path(files["dit"]).write_text(to_yaml(quick_recipe(folder / "dit", *SMALL_DIT)))
    script = Path(__file__).with_name("tensor_ranks.py")
    done = launch(4, script, json.dumps(files), folder, folder / "report", cwd=folder)
    reports = [folder / f"report.{rank}.json" for rank in range(4)]
    found = [json.loads(file.read_text()) if file.is_file() else {} for file in reports]
    output = done.stdout[-2000:] + done.stderr[-4000:]
    return lambda check: [report.get(check, f"it was not reached:\n{output}") for report in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    ["gradients", "dit", "dropout", "kept", "low", "tied", "updates", "compiled", TENSOR, "runs"]
    + ["resumed_dropout", "resumed_dit"],
)
def test_four_ranks(four_ranks, check):
    results = four_ranks(check)
    failed = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(results) if text != "passed")
    if failed:
        pytest.fail(failed, pytrace=False)
