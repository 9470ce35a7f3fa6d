"""Figures against plain computations, and what they refuse."""

import numpy as np
import pytest
import scipy.linalg
from PIL import Image, ImageFilter

from recipes.evaluation.config import Evaluation, Reference
from recipes.scoring.figures import figures
from recipes.scoring.reference import blurred, fingerprint


def config(**changes):
    values = {"kid_subsets": 1, "kid_subset_size": 40, "neighbours": 3, "splits": 2, "clip": "x"} | changes
    metrics = ["fid", "kid", "precision_recall", "inception_score", "clip_score"]
    return Evaluation(**{"out": "x", "reference": Reference(source=None), "metrics": metrics} | values)


@pytest.fixture
def sets():
    """Features of 40 generated pictures and of as many of a reference, with logits and scores."""
    rng = np.random.default_rng(0)
    generated = {
        "features": rng.normal(size=(40, 6)).astype(np.float32),
        "logits": rng.normal(size=(40, 5)).astype(np.float32),
        "scores": rng.normal(size=40).astype(np.float32),
    }
    return generated, (0.8 * rng.normal(size=(40, 6)) + 0.5).astype(np.float32)


def test_figures_are_those_of_their_definitions(sets):
    generated, reference = sets
    found = figures(config(), generated, reference)
    x, y = generated["features"].astype(np.float64), reference.astype(np.float64)
    # Heusel et al. 2017: |mu - mu'|^2 + tr(C + C' - 2 (C C')^(1/2))
    cx, cy = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = scipy.linalg.sqrtm(cx @ cy).real
    fid = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(cx + cy - 2 * root)
    assert found["fid"] == pytest.approx(fid, rel=1e-5)
    # Binkowski et al. 2018: the unbiased estimate with the kernel (x y / d + 1)^3, here over one subset of all
    kernel = lambda a, b: (a @ b.T / 6 + 1) ** 3  # noqa: E731

    def distance(x, y):
        off, pairs = 1 - np.eye(len(x)), len(x) * (len(x) - 1)
        return ((kernel(x, x) + kernel(y, y)) * off).sum() / pairs - 2 * kernel(x, y).mean()

    assert found["kid"] == pytest.approx(distance(x, y), rel=1e-4)
    # Over subsets, which torch-fidelity draws from the first set and the other in turn
    draws = np.random.RandomState(2020)
    subsets = [distance(x[draws.permutation(40)[:20]], y[draws.permutation(40)[:20]]) for _ in range(3)]
    several = figures(config(kid_subsets=3, kid_subset_size=20), generated, reference)
    assert several["kid"] == pytest.approx(np.mean(subsets), rel=1e-4)
    assert several["kid_std"] == pytest.approx(np.std(subsets), rel=1e-4)

    # Kynkaanniemi et al. 2019: the share that lies within the third neighbour's distance of any of the other set
    def covered(points, centres):
        radii = [np.sort(np.linalg.norm(centres - centre, axis=1))[3] for centre in centres]
        return np.mean([any(np.linalg.norm(centres - point, axis=1) <= radii) for point in points])

    assert found["precision"] == pytest.approx(covered(x, y), abs=1e-6)
    assert found["recall"] == pytest.approx(covered(y, x), abs=1e-6)
    assert 0 < found["recall"] < 1
    assert found["clip_score"] == pytest.approx(100 * np.maximum(generated["scores"], 0).mean(), rel=1e-5)
    # Salimans et al. 2016: exp of the mean divergence from the mean, over one part
    p = np.exp(generated["logits"]) / np.exp(generated["logits"]).sum(1, keepdims=True)
    score = lambda p: np.exp((p * np.log(p / p.mean(0))).sum(1).mean())  # noqa: E731
    assert figures(config(splits=1), generated, reference)["inception_score"] == pytest.approx(score(p), rel=1e-4)
    # Over two parts, after torch-fidelity has shuffled the pictures
    p = p[np.random.RandomState(2020).permutation(40)]
    halves = [score(p[:20]), score(p[20:])]
    assert found["inception_score"] == pytest.approx(np.mean(halves), rel=1e-4)
    assert found["inception_score_std"] == pytest.approx(np.std(halves), rel=1e-4)


def test_equal_sets_are_at_no_distance(sets):
    generated, _ = sets
    found = figures(config(), generated, generated["features"])
    assert abs(found["fid"]) < 1e-6 and found["precision"] == found["recall"] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kid_subset_size": 41}, "kid needs 41 generated pictures, and there are 40; or make kid_subset_size smaller"),
        ({"neighbours": 40}, "precision_recall needs 41 generated pictures, and there are 40"),
        ({"splits": 50}, "inception_score needs 50 images, and there are 40"),
    ],
)
def test_fewer_pictures_than_a_metric_needs(sets, changes, message):
    generated, reference = sets
    with pytest.raises(ValueError, match=message):
        figures(config(**changes), generated, reference)
    with pytest.raises(ValueError, match="fid needs 2 reference pictures, and there are 0"):
        figures(config(metrics=["fid"]), generated, reference[:0])
    reference[3, 2] = np.inf
    with pytest.raises(ValueError, match="features are not finite"):
        figures(config(), generated, reference)
    reference[3, 2] = 0
    generated["features"][3, 2] = np.nan
    with pytest.raises(ValueError, match="features are not finite"):
        figures(config(), generated, reference)


def test_a_blur_is_pillows():
    pictures = np.random.default_rng(0).integers(0, 256, (2, 9, 9, 3), dtype=np.uint8)
    assert blurred(pictures, 0) is pictures
    known = np.asarray(Image.fromarray(pictures[1]).filter(ImageFilter.GaussianBlur(2)))
    assert (blurred(pictures, 2)[1] == known).all()


def test_fingerprints():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": [3]})
    assert len(fingerprint({})) == 12
