"""What a config of an evaluation refuses."""

import pytest

from recipes.config.values import ConfigError
from recipes.evaluation.config import Evaluation, Extractor, Reference, Rerank

METRICS = ["fid", "kid", "precision_recall", "inception_score", "clip_score"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": "s3://bucket/x"}, "out: s3://bucket/x is remote; give a local folder"),
        ({"metrics": []}, "metrics: empty"),
        ({"extractor": Extractor(kind="contrastive")}, "extractor.path: missing"),
        ({"extractor": Extractor(kind="contrastive", path="x")}, "inception_score needs classes"),
        ({"clip": None}, "clip: missing"),
        ({"chunk": 0}, "chunk: 0; give 1 or more"),
        ({"images": 0}, "images: 0; give 1 or more"),
        ({"kid_subset_size": 0}, "kid_subset_size: 0; give 1 or more"),
        ({"reference": Reference(source=None, images=0)}, "reference.images: 0; give 1 or more"),
        ({"seed": -1}, "seed: -1; give 0 or more"),
        ({"seed": 2**62}, f"seed: {2**62}; give 0 or more, below"),
        ({"blur": [1, 2]}, r"blur: \[1, 2\]; give radii of 0 or more, 0 among them"),
        ({"rerank": Rerank(by="x", pools=[])}, "rerank.pools"),
        ({"sweeps": {"steps": []}}, "sweeps.steps: empty"),
    ],
)
def test_configs_that_cannot_be(changes, message):
    values = {"out": "x", "reference": Reference(source=None), "metrics": METRICS, "clip": "x"}
    with pytest.raises(ConfigError, match=message):
        Evaluation(**values | changes)
