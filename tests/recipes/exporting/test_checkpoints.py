"""Names of weights in checkpoints: Composer's have one more part in front."""

import functools

import pytest
import torch

from recipes.engines.checkpoints.same_model import saved_at
from recipes.exporting.checkpoints import read_checkpoint
from recipes.models.latent_diffusion.task import LatentDiffusion
from tests.recipes.exporting.runs import a_run


@pytest.fixture
def with_task(monkeypatch):
    """Models have a part of the name that Composer's part in front has."""
    build = LatentDiffusion.__init__

    def with_part(self, **parts):
        build(self, **parts)
        self.task = torch.nn.Linear(2, 2)

    monkeypatch.setattr(LatentDiffusion, "__init__", functools.wraps(build)(with_part))


@pytest.mark.parametrize("engine", ["composer", "lightning"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_may_have_a_part_of_the_same_name(with_task, quick_recipe, tmp_path, engine, sharded):
    """Such a checkpoint of Lightning was taken for one of another model, and its exports had other names."""
    path, task = a_run(quick_recipe(tmp_path / "run"), engine, sharded)
    saved_at(path, engine).check(task, "AdamW")
    found = read_checkpoint(path)
    assert found.weights.keys() == task.state_dict().keys()
    assert found.average.keys() == dict(task.named_parameters()).keys()
    averaged = read_checkpoint(path, "ema")
    if sharded:
        assert not averaged.weights.keys() & found.average.keys()
