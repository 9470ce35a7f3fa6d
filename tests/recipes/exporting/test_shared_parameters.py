"""Exports of a model whose blocks share a weight, which a state dict has under each of its names."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from recipes.export import main
from recipes.models.latent_diffusion.dit import DiT
from tests.recipes.exporting.runs import a_run


@pytest.fixture
def tied(monkeypatch):
    """Blocks of the transformer have one matrix in common."""
    build = DiT.__init__

    @functools.wraps(build)
    def tie(self, **sizes):
        build(self, **sizes)
        self.layers[1].mlp.fc1.weight = self.layers[0].mlp.fc1.weight

    monkeypatch.setattr(DiT, "__init__", tie)


@pytest.mark.parametrize("engine", ["composer", "lightning"])
@pytest.mark.parametrize("sharded", [False, True])
def test_averaged_weights_are_written_under_each_name(tied, quick_recipe, tmp_path, engine, sharded):
    """An average has them once, and the checkpoint's own weights twice."""
    path, task = a_run(quick_recipe(tmp_path / "run"), engine, sharded)
    for weights, factor in (("raw", 1), ("ema", 0.5)):
        main([str(path), str(tmp_path / weights), "--weights", weights])
        written = load_file(tmp_path / weights / "transformer" / "diffusion_pytorch_model.safetensors")
        expected = {name: tensor * factor for name, tensor in task.denoiser.state_dict().items()}
        assert written.keys() == expected.keys() and "layers.1.mlp.fc1.weight" in written
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items()), weights


def test_an_export_is_opened_with_one_parameter(tied, quick_recipe, tmp_path):
    path, task = a_run(quick_recipe(tmp_path / "run"))
    main([str(path), str(tmp_path / "out")])
    task.denoiser.load(tmp_path / "out" / "transformer")
    first, second = (task.denoiser.layers[number].mlp.fc1 for number in (0, 1))
    assert first.weight is second.weight
