"""The callback fid: figures of what the model draws against the reference, and what it refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from callbacks import fid
from callbacks.fid import Fid
from data.loading import Loading
from data.sources.base import Sample
from recipes.scoring.extractors import Features
from recipes.scoring.figures import Settings, figures
from tests.callbacks.stand_ins import Everything
from tests.recipes.training.fake_run import FakeRun

COLOURS = np.random.default_rng(0).integers(0, 256, (12, 3))


class Pictures:
    """A source of pictures of one colour each."""

    def shards(self):
        return ["a"]

    def read(self, shard):
        return [Sample(str(i), Image.new("RGB", (8, 8), tuple(colour)), f"{i}") for i, colour in enumerate(COLOURS)]


class Grid:
    """Draws noise that grows with the batch."""

    def __init__(
        self, task, output, loading, encoders, average, copies, *, prompts, seed, batch, steps: int = 3,
        scale: float = 1.0,
    ):
        self.prompts, self.seed, self.steps, self.scale = prompts, seed, steps, scale

    def begin(self, run):
        pass

    def images(self, run):
        draw = np.random.default_rng(run.clock.batch)
        return draw.integers(0, 256, (len(self.prompts), 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(fid, "GRIDS", {Everything: Grid})
    see = Features("mean colour", "none", "0", lambda pictures: {"features": pictures.mean((1, 2), dtype=np.float32)})
    monkeypatch.setattr(fid, "build_extractor", lambda kind, path, device, key: see)

    def build(task=None, **changes):
        values = {"reference": Pictures(), "every": "2ba", "images": 7, "sampling": {"steps": 5}, "seed": 3} | changes
        return Fid(task or Everything(), "out", Loading(loader=None, resolution=8), None, None, 1, **values)

    return build


def test_figures_are_those_of_the_images_and_the_reference(make):
    callback, run = make(), FakeRun(Everything(), duration="5ba")
    assert callback.grid.steps == 5 and callback.grid.seed == 3 and len(set(callback.grid.prompts)) == 7
    callback.begin(run)
    for batch in range(1, 6):
        callback.after_save(run.at(batch))
    settings = Settings(metrics=["fid", "kid"], kid_subset_size=3)  # half of the images
    for batch in (2, 4, 5):
        drawn = {"features": callback.grid.images(run.at(batch)).mean((1, 2), dtype=np.float32)}
        known = figures(settings, drawn, COLOURS.astype(np.float32))
        logged = [figures for at, figures in run.logged if at == batch]
        assert logged == [{f"images/{name}": value for name, value in known.items()}]
        assert known["kid_std"] > 1e-3 * abs(known["kid"])  # subsets of all images have none
    assert len(run.logged) == 3


def test_a_model_that_has_diverged_does_not_end_the_run(make, capsys):
    callback, run = make(), FakeRun(Everything(), duration="5ba")
    callback.begin(run)
    callback.features = lambda images: {"features": np.full((7, 3), np.nan)}
    callback.act(run.at(2))
    assert run.logged == [] and "features are not finite, nothing is logged" in capsys.readouterr().out


def test_a_picture_that_does_not_decode_is_left_out(make, monkeypatch, capsys):
    """Subsets of KID, whose size is no option here, have half of the pictures that are left."""
    monkeypatch.setattr("recipes.scoring.reference.BATCH", 5)
    cut = Sample("0", b"no picture", "0")
    monkeypatch.setattr(Pictures, "read", lambda self, shard, read=Pictures.read: [cut, *read(self, shard)[1:]])
    callback, run = make(images=12), FakeRun(Everything(), duration="5ba")
    see, seen = fid.build_extractor(None, None, None, None).network, []
    extractor = Features("", "", "", lambda pictures: seen.append(len(pictures)) or see(pictures))
    monkeypatch.setattr(fid, "build_extractor", lambda *_: extractor)
    callback.begin(run)
    assert seen == [4, 5, 2]  # large references do not fit into memory as pixels
    assert np.array_equal(callback.reference, COLOURS[1:])
    assert "reference: 1 of 12 pictures do not decode" in capsys.readouterr().out
    callback.act(run.at(2))
    assert callback.settings.kid_subset_size == 5 and len(callback.reference) == 11
    assert np.isfinite(list(run.logged[0][1].values())).all()


def test_options_of_the_grid_have_its_defaults(make):
    assert make(sampling=None).grid.steps == 3
    assert make(sampling={"scale": 3}).grid.scale == 3


@pytest.mark.parametrize(
    ("images", "pictures", "size"), [(2, 9, 2), (3, 3, 2), (256, 40, 20), (9, 40, 4), (5000, 5000, 1000)]
)
def test_subsets_of_kid(make, images, pictures, size):
    callback = make()
    callback._check_counts(images, pictures)
    assert callback.settings.kid_subset_size == size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": SimpleNamespace()}, "fid: a SimpleNamespace draws no images of captions"),
        ({"extractor": "contrastive"}, "fid: path is missing"),
        ({"sampling": {"stesp": 1}}, "sampling.stesp: no option of Everything models, which have scale, steps"),
        ({"sampling": {"prompts": []}}, "sampling.prompts: no option"),
        ({"sampling": {"steps": 2.5}}, "sampling.steps: 2.5; give "),
        ({"sampling": {"steps": True}}, "sampling.steps: True; give "),
        ({"sampling": {"scale": "3"}}, "sampling.scale: '3'; give "),
        ({"seed": -1}, "fid: seed: -1; give 0 or more"),
        ({"images": 13}, "^fid: images: 13 wanted, and the reference has 12 captions; give at most as many"),
        ({"images": 1}, "fid needs 2 generated pictures, and there are 1"),
        ({"reference_images": 99}, "^fid: reference_images: 99 wanted, and the source has 12; give at most as many"),
    ],
)
def test_what_it_refuses(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
