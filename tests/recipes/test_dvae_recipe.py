"""The dVAE's recipes train for real, on pictures in tars, at a small size."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.sources.filters import Filter
from recipes.config.recipe import Recipe, load_config
from recipes.models.dvae.files import load_dvae
from recipes.planning.dry_run import describe_run

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model={codes: 32, hidden: 8, blocks: 1, initial: 8}",
    "data={resolution: 16, workers: 0}",
    "evals.val={resolution: 16}",
    "optimizer.lr=4e-3",
    "training={duration: 12ba, global_batch: 8, microbatch: null, precision: auto, device: cpu, eval_every: 6ba}",
    "checkpoints={every: 6ba, keep: -1, autoresume: false}",
    "callbacks.memory_monitor=null",
    "loggers={}",
]


@pytest.fixture(scope="module")
def small(drawings):
    """(output, overrides) -> yamls/dvae.yaml at a size that trains in seconds, with its schedules within 12 batches."""

    def make(output, *overrides):
        tars = {split: f"{drawings}/{split}/*.tar" for split in ("train", "val")}
        return load_config(
            ROOT / "yamls" / "dvae.yaml",
            [
                *SMALL,
                f"data.source.urls={tars['train']}",
                f"evals.val.source.urls={tars['val']}",
                "data.filter=null",
                "evals.val.filter=null",
                "callbacks.beta.over=4ba",
                "callbacks.temperature.over=8ba",
                "callbacks.reconstructions={every: 6ba, pictures: 4}",
                "callbacks.export.every=6ba",
                "schedule={final: 0.1, over: 10ba}",
                f"output={output}",
                *overrides,
            ],
            Recipe,
        )

    return make


@pytest.fixture(scope="module")
def whole(small, fit, tmp_path_factory):
    recipe = small(tmp_path_factory.mktemp("whole") / "run")
    return recipe, fit(recipe)


def weights(trainer):
    return [p.detach() for p in trainer.state.model.parameters()]


def test_what_a_run_leaves(whole):
    recipe, trainer = whole
    output = Path(recipe.output)
    network = load_dvae(output / "export")
    assert network.sizes == {"codes": 32, "hidden": 8, "blocks": 1, "initial": 8}
    # An autoencoder's export has the average in place of the weights.
    own, made = trainer.state.model.task.network.encoder.blocks.input.w, network.encoder.blocks.input.w
    assert (own != made).any() and (own - made).abs().max() < 0.1
    grids = sorted(file.name for file in (output / "reconstructions").iterdir())
    assert grids == ["ba0000006.png", "ba0000012.png"]
    assert np.asarray(Image.open(output / "reconstructions" / grids[1])).std() > 10
    figures = {name: float(value) for name, value in trainer.state.eval_metric_values.items()}
    assert set(figures) == {"loss", "nll", "kl", "psnr"}
    assert figures["loss"] == pytest.approx(figures["nll"] + figures["kl"] / 192, rel=1e-4)


def test_codes_of_every_validation_are_counted(small, fit, tmp_path, capsys):
    fit(
        small(
            tmp_path,
            "training={duration: 2ba, eval_every: 1ba}",
            "checkpoints.save=false",
            "algorithms.scheduled_ema=null",
        )
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "of 32 codes used, perplexity" in line]
    assert [line.split(": ")[1] for line in lines] == ["val at batch 1", "val at batch 2"]


def test_schedules_have_come_to_their_ends(whole):
    _, trainer = whole
    task = trainer.state.model.task
    assert float(task.beta) == pytest.approx(6.6) and float(task.temperature) == 0.0625
    # After 10 of 12 batches the learning rate stands at a tenth.
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.4)


def test_a_run_that_stopped_goes_on_as_if_it_had_not(whole, small, fit, tmp_path):
    recipe, trainer = whole
    checkpoint = next(Path(recipe.output, "checkpoints").glob("*ba6-rank0.pt"))
    resumed = fit(small(tmp_path, f"checkpoints.load_path={checkpoint}", "evals.val=null"))
    assert resumed.state.timestamp.batch == 12
    assert all((a == b).all() for a, b in zip(weights(resumed), weights(trainer), strict=True))


def test_a_picture_that_kills_its_decoder_is_left_out(small, fit, tmp_path, monkeypatch, capfd):
    decode = Filter.decode

    def kill(self, sample, shrink_to=None):
        if sample.key == "00001_0012":
            os.kill(os.getpid(), signal.SIGSEGV)
        return decode(self, sample, shrink_to)

    monkeypatch.setattr(Filter, "decode", kill)
    without = ["data.workers=1", "evals.val=null", "checkpoints.save=false", "callbacks.reconstructions=null"]
    assert fit(small(tmp_path, *without, "training.duration=6ba")).state.timestamp.batch == 6
    deaths = [json.loads(line) for line in (tmp_path / "crashes.jsonl").read_text().splitlines()]
    assert [death["key"] for death in deaths] == ["00001_0012"] * 2
    # PyTorch names the signal, or says that the worker exited unexpectedly, by what it notices first.
    line = r"DataLoader worker .* again at sample \d+ \(00001_0012\) of 00001-.*: rejected as kills_decoder"
    assert re.search(line, capfd.readouterr().out)


def test_the_published_recipe_says_its_size():
    recipe = load_config(ROOT / "yamls" / "dvae.yaml", [], Recipe, missing := [])
    text = describe_run(recipe, missing)
    assert "model: dvae, 97,616,006 parameters, 97,616,006 of them trained" in text
    assert "512 samples per step over 1 device (WORLD_SIZE), 512 on each, in 64 microbatches of 8" in text
