"""The text-conditioned U-Net of latent diffusion, from diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from data.ranges import check_least, check_shares
from recipes.models.autocast import for_products
from recipes.models.latent_diffusion.denoiser import Denoiser
from recipes.models.weights import load_diffusers, open_diffusers


class UNet(Denoiser):
    """Diffusers' U-Net as a denoiser.

    Args:
        network: its weights keep diffusers' names, after `network.`.
    """

    name = "unet"
    folder = "unet"

    def __init__(self, network: UNet2DConditionModel) -> None:
        super().__init__()
        self.network = network
        self.latent_channels = network.config.in_channels
        self.text_width = network.config.cross_attention_dim
        self.grid_multiple = 2 ** (len(network.config.block_out_channels) - 1)  # the grid halves between levels

    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """The network's prediction (B, C, H, W). See `Denoiser.forward`."""
        text = for_products(text)  # read by two layers per transformer block
        return self.network(latents, times, encoder_hidden_states=text, return_dict=False)[0]

    def blocks(self) -> list[nn.Module]:
        """One block per level on the way down, the middle block, and one block per level on the way up."""
        return [*self.network.down_blocks, self.network.mid_block, *self.network.up_blocks]

    def recomputed_blocks(self) -> list[nn.Module]:
        """Residual blocks and transformers.

        They are finer than `blocks()`: the largest level alone would keep a third of all activations.
        """
        parts = [(*block.resnets, *(getattr(block, "attentions", None) or ())) for block in self.blocks()]
        return [module for part in parts for module in part]

    def save(self, folder: Path) -> None:
        """Write config.json and safetensors that `UNet2DConditionModel.from_pretrained` opens."""
        self.network.save_pretrained(str(folder), safe_serialization=True)

    def load(self, folder: Path) -> None:
        """See `Denoiser.load`."""
        load_diffusers(self.network, folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """See `Denoiser.open`."""
        return cls(open_diffusers(UNet2DConditionModel, folder))

    def for_diffusers(self) -> UNet2DConditionModel:
        """See `Denoiser.for_diffusers`."""
        return self.network


def unet(
    *,
    channels: list[int],
    attention: list[bool],
    heads: list[int],
    text_width: int,
    latent_channels: int = 4,
    sample_size: int = 64,
    blocks: int = 2,
    norm_groups: int = 32,
    dropout: float = 0.0,
) -> UNet:
    """The U-Net of Stable Diffusion 2 (Rombach et al. 2022, sections 3.2 and 3.3), at any width.

    Args:
        channels: width of each level, from the full grid down.
        attention: whether a level has transformer blocks (self-attention and cross-attention to the text).
        heads: attention heads of each level.
        text_width: width of the text embedding.
        latent_channels: channels of the latents.
        sample_size: side of the latent grid in the network's configuration; any side can be used.
        blocks: residual blocks per level on the way down; one more on the way up.
        norm_groups: groups of every GroupNorm.
        dropout: dropout of the residual blocks; the transformer blocks have none, as in diffusers.

    Raises:
        ValueError: the lists have different lengths, sizes are below 1, or widths do not divide.
    """
    if not len(channels) == len(attention) == len(heads):
        lengths = f"channels {len(channels)}, attention {len(attention)}, heads {len(heads)}"
        raise ValueError(f"unet: each list needs one entry per level, got {lengths}")
    check_least("unet", 1, channels=min(channels, default=0), heads=min(heads, default=0), norm_groups=norm_groups)
    check_least("unet", 1, text_width=text_width, latent_channels=latent_channels, blocks=blocks)
    check_shares("unet", dropout=dropout)
    for width, count in zip(channels, heads, strict=True):
        if width % count or width % norm_groups:
            raise ValueError(
                f"unet: width {width} must be a multiple of its heads ({count}) and norm_groups ({norm_groups})"
            )
    down = tuple("CrossAttnDownBlock2D" if on else "DownBlock2D" for on in attention)
    up = tuple("CrossAttnUpBlock2D" if on else "UpBlock2D" for on in reversed(attention))
    network = UNet2DConditionModel(
        sample_size=sample_size,
        in_channels=latent_channels,
        out_channels=latent_channels,
        block_out_channels=tuple(channels),
        down_block_types=down,
        up_block_types=up,
        layers_per_block=blocks,
        cross_attention_dim=text_width,
        attention_head_dim=tuple(heads),  # the number of heads, by the name that diffusers keeps for it
        use_linear_projection=True,
        norm_num_groups=norm_groups,
        dropout=dropout,
    )
    return UNet(network)
