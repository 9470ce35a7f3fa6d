"""The divided model equals the whole one: four ranks in one launch."""

import json
from pathlib import Path

import pytest

from recipes.config.recipe import Recipe, load_config, to_yaml
from tests.ranks import launch

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


@pytest.fixture(scope="module")
def four_ranks(token_sets, tmp_path_factory):
    """A check's name -> what the ranks reported of it."""
    folder = tmp_path_factory.mktemp("four_ranks")
    paths = [
        f"data.streams.train.path={token_sets}/train",
        f"evals.val.streams.val.path={token_sets}/val",
        f"data.vocabulary={token_sets}/vocabulary.json",
    ]
    recipe = load_config(ROOT / "yamls" / "openmoji_dalle.yaml", [*SMALL, *paths], Recipe)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    script = Path(__file__).with_name("tensor_ranks.py")
    done = launch(4, script, folder / "recipe.yaml", folder, folder / "report", cwd=folder)
    reports = [folder / f"report.{rank}.json" for rank in range(4)]
    found = [json.loads(file.read_text()) if file.is_file() else {} for file in reports]
    output = done.stdout[-2000:] + done.stderr[-4000:]
    return lambda check: [report.get(check, f"it was not reached:\n{output}") for report in found]


@pytest.mark.slow
@pytest.mark.parametrize("check", ["gradients", "updates", "compiled", "runs"])
def test_four_ranks(four_ranks, check):
    results = four_ranks(check)
    failed = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(results) if text != "passed")
    if failed:
        pytest.fail(failed, pytrace=False)
