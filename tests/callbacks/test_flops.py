"""FLOPs: as published, and equal to a count by hand, attention included, in any number format."""

import pytest
import torch
import torch._dynamo  # imported later, inside of the meta device's mode, it fails
from diffusers.models.attention_processor import Attention
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from callbacks.flops import flops_per_sample
from recipes.models.contrastive.task import ContrastiveText
from recipes.models.dvae.network import Conv
from recipes.models.dvae.task import DiscreteAutoencoder
from recipes.models.kl_autoencoder.task import KLAutoencoder
from recipes.models.latent_diffusion.ddpm import DDPM
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.latent_diffusion.unet import unet
from recipes.models.task import Task


def counted(make, batch):
    def blank():
        with torch.device("meta"):
            return make()

    return flops_per_sample(blank, batch)


def by_hand(task, batch):
    """Twice the number of multiplications of the products in a forward pass that is computed, per sample."""
    total = 0

    def layer(module, inputs, output):
        nonlocal total
        weight = module.w if isinstance(module, Conv) else module.weight
        total += 2 * output.numel() * weight[0].numel()

    def attention(module, inputs, kwargs, output):
        nonlocal total
        queries = inputs[0].flatten(2).shape[-1] if inputs[0].dim() == 4 else inputs[0].shape[1]
        text = kwargs.get("encoder_hidden_states")
        keys = queries if text is None else text.shape[1]
        total += 2 * 2 * len(inputs[0]) * queries * keys * module.inner_dim

    for module in task.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, Conv)):
            module.register_forward_hook(layer)
        elif isinstance(module, Attention):
            module.register_forward_hook(attention, with_kwargs=True)
    task(batch)
    return total / len(next(iter(batch.values())))


@pytest.mark.parametrize(("side", "gflop"), [(32, 181), (64, 804)])
def test_the_counter_gives_the_published_flops_of_the_unet(side, gflop):
    with torch.device("meta"):
        network = unet(
            channels=[320, 640, 1280, 1280], attention=[True, True, True, False], heads=[5, 10, 20, 20], text_width=1024
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.empty(1, 4, side, side), torch.zeros(1, dtype=torch.long), torch.empty(1, 77, 1024))
    assert round(counter.get_total_flops() / 1e9) == gflop


def diffusion():
    denoiser = unet(channels=[32, 64], attention=[True, False], heads=[1, 2], text_width=16, blocks=1)
    return LatentDiffusion(denoiser=denoiser, objective=DDPM(prediction="epsilon"))


@pytest.mark.parametrize("text", [torch.float32, torch.bfloat16])
def test_diffusion(text):
    batch = {"latents": torch.randn(3, 4, 8, 8), "text": torch.randn(3, 12, 16)}
    expected = by_hand(diffusion(), batch)
    assert counted(diffusion, batch | {"text": batch["text"].to(text)}) == expected


@pytest.mark.parametrize("kind", ["dvae", "kl"])
def test_autoencoders(kind):
    def make():
        if kind == "dvae":
            return DiscreteAutoencoder(codes=16, hidden=8, blocks=1, initial=8)
        return KLAutoencoder(channels=[16, 16], blocks=1, norm_groups=4, middle_attention=True)

    batch = {"image": torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)}
    assert counted(make, batch) == by_hand(make(), batch)


def test_contrastive():
    """Both towers are transformers of one width here: E wide, L positions, 12 E^2 weights per layer."""
    width, text, patches, grid = 64, 10, 8, 4
    sizes = {"width": width, "layers": 2, "heads": 2, "context_length": text, "vocabulary": 49408}
    pictures = {"picture_size": patches * grid, "patch_size": patches, "picture_width": width, "picture_layers": 3}
    batch = {"image": torch.zeros(5, 3, 32, 32, dtype=torch.uint8), "tokens": torch.ones(5, text, dtype=torch.int64)}

    def tower(layers, positions):
        return layers * (2 * positions * 12 * width**2 + 2 * 2 * positions**2 * width)

    embedding = 2 * 2 * width * 32 + 2 * 2 * 32  # both projections, and the products with two samples of the other kind
    stem = 2 * grid**2 * 3 * patches**2 * width
    expected = tower(2, text) + tower(3, grid**2 + 1) + stem + embedding
    assert counted(lambda: ContrastiveText(**sizes, **pictures, embedding=32), batch) == expected


class Draws(Task):
    """A product of 8 x 8 with a vector, and initial weights drawn on the CPU."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.start = torch.randn(3, device="cpu")

    def forward(self, batch):
        return {"total": self.layer(batch["x"]).mean()}


def test_no_random_number_is_drawn():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    assert counted(Draws, {"x": torch.ones(5, 8)}) == 2 * 8 * 8
    assert torch.equal(torch.rand(4), expected)


def test_what_reads_values_is_refused():
    task = Draws()
    task.forward = lambda batch: {"total": torch.tensor(batch["x"].sum().item())}
    with pytest.raises(RuntimeError, match="meta"):
        flops_per_sample(lambda: task, {"x": torch.ones(5, 8)})
