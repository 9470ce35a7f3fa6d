"""Features of pictures."""

import numpy as np
import pytest
import torch

from recipes.engines.precision import allow_tf32
from recipes.scoring.extractors import BATCH, Features


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
