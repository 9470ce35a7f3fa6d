"""Every implementation of attention gives the same, or says why it cannot run."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

from recipes.algorithms.modules.attention import AttentionImplementation, use_attention, why_not_xformers
from recipes.models.latent_diffusion.unet import unet
from tests.recipes.training.fake_run import FakeRun


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    sizes = {"channels": [16, 16], "attention": [True, True], "heads": [1, 2], "text_width": 8}
    network = unet(**sizes, blocks=1, norm_groups=8).eval()
    torch.nn.init.normal_(network.network.conv_out.weight, std=0.1)
    return network


def processors(network):
    return {type(processor) for processor in network.network.attn_processors.values()}


def test_implementations_agree(network):
    x, timesteps, text = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.randn(2, 5, 8)
    made = {}
    for name, processor in (("sdpa", AttnProcessor2_0), ("eager", AttnProcessor)):
        count, chosen = use_attention(network, name, on_gpu=False)
        assert count == len(network.network.attn_processors) > 8 and chosen == name
        assert processors(network) == {processor}
        with torch.no_grad():
            made[name] = network(x, timesteps, text)
    torch.testing.assert_close(made["sdpa"], made["eager"], rtol=1e-4, atol=1e-5)


def test_auto_is_sdpa_without_a_gpu(network):
    assert use_attention(network, "auto", on_gpu=False)[1] == "sdpa"
    assert processors(network) == {AttnProcessor2_0}


def test_xformers_says_why_it_cannot_run(network):
    with pytest.raises(ValueError, match=r"xformers cannot run here \(it needs a GPU\); use sdpa or auto"):
        use_attention(network, "xformers", on_gpu=False)
    if not torch.cuda.is_available():
        assert "\n" not in why_not_xformers(on_gpu=True)


def test_a_model_without_attention_is_an_error():
    with pytest.raises(ValueError, match="no diffusers attention block"):
        use_attention(torch.nn.Linear(1, 1), "sdpa", on_gpu=False)


def test_the_lever(network, capsys):
    run = FakeRun(network)
    AttentionImplementation(implementation="eager").change_modules(run)
    assert processors(network) == {AttnProcessor}
    assert run.settings == {"attention": "eager"}
    assert capsys.readouterr().out == f"attention: eager in {len(network.network.attn_processors)} blocks\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_xformers_agrees_on_a_gpu(network):
    if why_not_xformers(on_gpu=True):
        pytest.skip(why_not_xformers(on_gpu=True))
    x, timesteps, text = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.randn(2, 5, 8)
    made = {}
    network.cuda()
    for name in ("sdpa", "xformers"):
        use_attention(network, name, on_gpu=True)
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            made[name] = network(x.cuda(), timesteps.cuda(), text.cuda())
    network.cpu()
    torch.testing.assert_close(made["sdpa"], made["xformers"], rtol=1e-2, atol=1e-2)
