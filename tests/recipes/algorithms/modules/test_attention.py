"""Every implementation of attention gives the same, or says why it cannot run."""

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.algorithms.modules.attention import AttentionImplementation, use_attention, why_not_xformers
from recipes.models.blocks.attention import AttentionOnViews, FlashProcessor, flash, sdpa
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
    for name, processor in (("sdpa", AttentionOnViews), ("flash", AttentionOnViews), ("eager", AttnProcessor)):
        count, chosen = use_attention(network, name, on_gpu=False)
        assert count == len(network.network.attn_processors) > 8 and chosen == name
        assert processors(network) == {processor}
        with torch.no_grad():
            made[name] = network(x, timesteps, text)
    torch.testing.assert_close(made["sdpa"], made["eager"], rtol=1e-4, atol=1e-5)
    assert torch.equal(made["flash"], made["sdpa"])  # on a CPU the same kernel


@pytest.mark.parametrize("processor", [AttentionOnViews(flash), FlashProcessor()])
def test_flash_is_without_the_kernels_of_cudnn(processor, monkeypatch):
    """Inside of the call, and compiled as one graph; the settings of the process stay as they are."""
    block, x = Attention(32, heads=4, dim_head=8), torch.randn(2, 6, 32)
    block.set_processor(processor)
    expected = block(x)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
    plain, seen = F.scaled_dot_product_attention, []

    def attention(*arguments, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    block(x)
    assert seen == [False] and torch.backends.cuda.cudnn_sdp_enabled()


def test_auto_is_sdpa_without_a_gpu(network):
    assert use_attention(network, "auto", on_gpu=False)[1] == "sdpa"
    assert processors(network) == {AttentionOnViews}


class Doubled(AttnProcessor2_0):
    """As a model of one's own may have."""

    def __call__(self, *arguments, **options):
        return 2 * super().__call__(*arguments, **options)


def test_processors_of_ones_own_stay():
    """They were replaced without a word, and the model computed something else."""
    blocks = torch.nn.ModuleList(Attention(16, heads=2, dim_head=8) for _ in range(2))
    blocks[0].set_processor(Doubled())
    assert use_attention(blocks, "sdpa", on_gpu=False) == (1, "sdpa")
    assert [type(block.processor) for block in blocks] == [Doubled, AttentionOnViews]
    with pytest.raises(ValueError, match="no diffusers attention block to change, 1 with processors such as Doubled;"):
        use_attention(blocks[:1], "sdpa", on_gpu=False)


@pytest.mark.parametrize("name", ["sdpa", "flash", "eager"])
def test_masks_are_kept(name):
    block, x = Attention(16, heads=2, dim_head=8), torch.randn(2, 5, 16)
    mask = torch.randn(2, 1, 5)
    expected = block(x, attention_mask=mask)
    use_attention(block, name, on_gpu=False)
    torch.testing.assert_close(block(x, attention_mask=mask), expected)


@pytest.mark.parametrize("picture", [False, True])
@pytest.mark.parametrize("text", [None, 24])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_views_give_what_diffusers_gives(picture, text, form):
    """With the options of U-Nets and autoencoders, in 64 bits, gradients too."""
    torch.manual_seed(0)
    options = {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0} if picture else {}
    block = Attention(32, text, heads=4, dim_head=8, bias=picture, **options).double()
    x = torch.randn(2, 32, 3, 5, dtype=torch.float64).to(memory_format=form)
    x = (x if picture else x.flatten(2).transpose(1, 2)).requires_grad_()
    source = None if text is None else torch.randn(2, 7, text, dtype=torch.float64)
    results = []
    for processor in (AttnProcessor2_0(), AttentionOnViews(sdpa)):
        block.set_processor(processor)
        y = block(x, encoder_hidden_states=source)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not picture or results[1][0].is_contiguous(memory_format=form)


def test_views_copy_nothing():
    block = Attention(32, heads=4, dim_head=8)
    block.set_processor(AttentionOnViews(sdpa))
    copies = Operations("clone", "copy_", "_to_copy", "contiguous", "div")
    with copies:
        block(torch.randn(2, 6, 32)).sum().backward()
    assert copies.found == []
    block.set_processor(AttnProcessor2_0())
    with copies:
        block(torch.randn(2, 6, 32)).sum().backward()
    assert copies.found  # the division by 1


class Operations(TorchDispatchMode):
    """The operations with some names that ran."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.found = names, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.names:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_blocks_with_other_options_keep_diffusers_processors():
    block = Attention(32, heads=4, dim_head=8, qk_norm="layer_norm")
    use_attention(torch.nn.Sequential(block), "sdpa", on_gpu=False)
    assert type(block.processor) is AttnProcessor2_0


def test_xformers_says_why_it_cannot_run(network):
    with pytest.raises(ValueError, match="xformers' kernels need a GPU; use sdpa or auto"):
        AttentionImplementation(implementation="xformers").change_modules(FakeRun(network))
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
