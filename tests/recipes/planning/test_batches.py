"""What a sample takes, by the manifests of encoded sets."""

import json
from pathlib import Path

import pytest

from recipes.config.recipe import Recipe, load_config
from recipes.planning.batches import stored_bytes
from recipes.planning.plan import Planner

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["model.denoiser.channels=[32,32]", "model.denoiser.attention=[true,false]", "model.denoiser.heads=[1,1]"]


def sizes(root, name, *sets):
    """Bytes per sample and number of samples of each set, by its manifest."""
    manifests = [json.loads((root / label / name).read_text()) for label in sets]
    return [(manifest["bytes"] / manifest["samples"], manifest["samples"]) for manifest in manifests]


def test_a_plan_counts_all_that_a_set_holds_of_a_sample(latent_sets):
    """Its two resolutions, of which the recipe reads one."""
    path = f"data.streams.train.path={latent_sets}/train"
    own = ["data.resolution=16", "data.expect=null", "model.denoiser.text_width=16", "training.global_batch=8", path]
    planner = Planner(load_config(ROOT / "yamls" / "sd2_base.yaml", [*SMALL, *own], Recipe, []))
    ((size, _),) = sizes(latent_sets, "manifest.json", "train")
    assert planner.sample_bytes == size > 2 * 2 * 4 * (8**2 + 16**2)
    assert f"{size / 1e3:,.1f} kB per sample" in planner.report([], None)


def test_sets_count_by_how_often_they_are_read(text_sets):
    paths = [f"data.streams.{label}.path={text_sets}/{label}" for label in ("docs", "captions")]

    def stored(*changes):
        return stored_bytes(load_config(ROOT / "yamls" / "docs_gpt2.yaml", [*paths, *changes], Recipe, []))

    (docs, rows), (captions, others) = sizes(text_sets, "text.json", "docs", "captions")
    assert docs != captions
    assert stored("data.streams.docs.repeat=3") == pytest.approx(
        (3 * rows * docs + others * captions) / (3 * rows + others)
    )
    shares = ("data.streams.docs.proportion=0.25", "data.streams.captions.proportion=0.75")
    assert stored(*shares) == pytest.approx(0.25 * docs + 0.75 * captions)
    assert stored("data.streams.docs.path=nowhere") is None
