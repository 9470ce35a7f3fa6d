"""Gates in one kernel change nothing of a model but how they are computed."""

import copy

import pytest
import torch

from recipes.algorithms.modules.fused_geglu import FusedGates, FusedGEGLU, fuse_gates
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.training.fake_run import FakeRun


def test_the_lever_on_a_cpu(capsys):
    torch.manual_seed(0)
    network = unet(channels=[16, 16], attention=[True, True], heads=[1, 2], text_width=8, blocks=1, norm_groups=8)
    plain = copy.deepcopy(network)
    run = FakeRun(network)
    FusedGates(run.task).change_modules(run)
    assert sum(isinstance(module, FusedGEGLU) for module in network.modules()) == run.settings["fused_geglu"] == 7
    assert capsys.readouterr().out == "fused_geglu: 7 gates, by PyTorch: the kernels need a GPU\n"
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.randn(2, 5, 8)
    for one, other in zip(network.state_dict().items(), plain.state_dict().items(), strict=True):
        assert one[0] == other[0] and one[1].shape == other[1].shape
    assert torch.equal(network(*inputs), plain(*inputs))
    with pytest.raises(ValueError, match="^fused_geglu: the model has no GEGLU"):
        fuse_gates(network)
