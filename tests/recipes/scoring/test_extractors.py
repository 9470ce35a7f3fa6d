"""Features of pictures."""

import numpy as np
import pytest
import torch

from recipes.engines.precision import allow_tf32
from recipes.scoring.extractors import BATCH, Features, inception


@pytest.fixture
def tf32():
    before = flags()
    allow_tf32()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def flags():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_features_are_computed_without_tf32_also_while_a_model_trains_with_it(tf32):
    seen = []

    def network(pictures):
        seen.append((len(pictures), flags()))
        return {"features": pictures[:, 0, 0, :1].astype(np.float32)}

    pictures = np.zeros((BATCH + 1, 2, 2, 3), np.uint8)
    assert Features("network", "none", "", network)(pictures)["features"].shape == (BATCH + 1, 1)
    assert seen == [(BATCH, (False, False)), (1, (False, False))]
    assert flags() == (True, True)


@pytest.mark.parametrize(("content", "reason"), [("a page of a proxy", "invalid hash value"), (None, "No such file")])
def test_weights_that_cannot_be_fetched(content, reason, tmp_path, monkeypatch):
    """A file that was cut, or that a proxy sent, was a traceback."""
    source = tmp_path / "weights-6726825d.pth"
    if content is not None:
        source.write_text(content)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch_fidelity.feature_extractor_inceptionv3.URL_INCEPTION_V3", source.as_uri())
    said = f"^fid: path: {source.as_uri()} cannot be fetched .*{reason}.*; fetch it on another machine, and give the pa"
    with pytest.raises(ValueError, match=said):
        inception(None, "cpu", "fid: path")
    assert not list((tmp_path / "cache" / "hub" / "checkpoints").iterdir())
