"""A diffusion transformer over patches of latents (DiT), with text as a pooled vector and by cross-attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.ranges import check_least
from recipes.models.latent_diffusion.denoiser import Denoiser
from recipes.models.legacy_weights import separated
from recipes.models.network_folder import load_into, load_network, save_network
from recipes.models.tensor_plan import DividedBranch, TensorPlan

WEIGHTS = "diffusion_pytorch_model.safetensors"
_separated = partial(separated, prefix="denoiser.")  # the tensors of an earlier version under their names of today
FREQUENCIES = 256  # width of the sinusoidal time embedding, as in DiT

# Letters: B batch, C latent channels, H W latent grid, N patches, L text positions, T text width, D width.


class DiT(Denoiser):
    """Diffusion transformer (Peebles and Xie 2023, adaLN-Zero) with cross-attention to text (Chen et al. 2023).

    Every block is modulated by the time and by one vector that attention pools from the text. With `cross_attention`
    the patches of every block also attend to the vectors of the text.
    """

    name = "dit"
    folder = "transformer"

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        text_width: int,
        latent_channels: int = 4,
        patch_size: int = 2,
        text_layers: int = 0,
        cross_attention: bool = True,
        mlp_ratio: int = 4,
    ) -> None:
        """Build it with new weights.

        Names of weights are those of the published DiT and PixArt-alpha, except for queries, keys and values, which are
        rows of one matrix there. Weights with the published names are converted when they are loaded.

        Args:
            width: width of the patches' vectors; a multiple of 4 and of heads.
            layers: blocks.
            heads: attention heads of every block.
            text_width: width of the text embedding.
            latent_channels: channels of the latents.
            patch_size: side of a patch in latents.
            text_layers: transformer blocks over the text, trained with the network.
            cross_attention: whether blocks attend to the text. Without it the text only modulates them, which is
                cheaper.
            mlp_ratio: width of the hidden layer of every MLP, relative to `width`.

        Raises:
            ValueError: sizes below 1, or widths that do not divide.
        """
        super().__init__()
        sizes = {"layers": layers, "heads": heads, "text_width": text_width, "latent_channels": latent_channels}
        check_least("dit", 1, width=width, patch_size=patch_size, mlp_ratio=mlp_ratio, **sizes)
        check_least("dit", 0, text_layers=text_layers)
        if width % heads or width % 4:
            raise ValueError(f"dit: width {width} must be a multiple of heads ({heads}) and of 4")
        self.config: dict[str, Any] = {
            "width": width,
            "layers": layers,
            "heads": heads,
            "text_width": text_width,
            "latent_channels": latent_channels,
            "patch_size": patch_size,
            "text_layers": text_layers,
            "cross_attention": cross_attention,
            "mlp_ratio": mlp_ratio,
        }
        self.width = width
        self.text_width, self.latent_channels = text_width, latent_channels
        self.patch_size = self.grid_multiple = patch_size
        self.x_embedder = nn.Linear(latent_channels * patch_size**2, width)
        self.t_embedder = Mlp(FREQUENCIES, width, width, nn.SiLU())
        self.y_embedder = nn.Linear(text_width, width)
        self.y_blocks = nn.ModuleList(TextBlock(width, heads, mlp_ratio) for _ in range(text_layers))
        self.y_norm = nn.LayerNorm(width)
        self.y_pool = CrossAttention(width, heads)
        self.y_query = nn.Parameter(torch.zeros(1, 1, width))
        self.y_pooled = Mlp(width, width, width, nn.SiLU())
        self.y_attended = nn.Identity()  # the text that the blocks attend to
        self.layers = nn.ModuleList(Block(width, heads, mlp_ratio, cross_attention) for _ in range(layers))
        self.final_layer = FinalLayer(width, latent_channels * patch_size**2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """DiT's initialisation: each block begins as the identity, and the output as zero."""
        gains: dict[nn.Module, float] = {}  # the published networks draw these as rows of one larger matrix
        for module in self.modules():
            if isinstance(module, SelfAttention):
                gains |= dict.fromkeys((module.q, module.k, module.v), math.sqrt(1 / 2))
            elif isinstance(module, CrossAttention):
                gains |= dict.fromkeys((module.k_linear, module.v_linear), math.sqrt(2 / 3))
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gains.get(module, 1.0))
                nn.init.zeros_(module.bias)
        for mlp in (self.t_embedder, self.y_pooled):
            nn.init.normal_(mlp.fc1.weight, std=0.02)
            nn.init.normal_(mlp.fc2.weight, std=0.02)
        nn.init.normal_(self.y_query, std=0.02)
        for block in self.layers:
            nn.init.zeros_(block.adaLN_modulation.weight)
            if block.cross_attn is not None:
                nn.init.zeros_(block.cross_attn.proj.weight)
        nn.init.zeros_(self.final_layer.adaLN_modulation.weight)
        nn.init.zeros_(self.final_layer.linear.weight)

    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """The prediction (B, C, H, W). See `Denoiser.forward`."""
        p = self.patch_size
        height, width = latents.shape[2] // p, latents.shape[3] // p
        x = F.pixel_unshuffle(latents, p).flatten(2).transpose(1, 2)  # BN(Cpp)
        x = self.x_embedder(x) + grid_positions(height, width, self.width, x.device).to(x)  # BND
        y = self.y_embedder(text)  # BLD
        y = y + positions(torch.arange(y.shape[1], device=y.device), self.width).to(y)
        for block in self.y_blocks:
            y = block(y)
        y = self.y_norm(y)
        pooled = self.y_pool(self.y_query.repeat(len(y), 1, 1), y).squeeze(1)  # BD
        time = self.t_embedder(positions(times, FREQUENCIES).to(self.t_embedder.fc1.weight))  # BD
        c = F.silu(time + self.y_pooled(pooled))  # BD
        y = self.y_attended(y)
        for block in self.layers:
            x = block(x, y, c)
        x = self.final_layer(x, c)  # BN(Cpp)
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (height, width)), p)  # BCHW

    def blocks(self) -> list[nn.Module]:
        """See `Task.blocks`."""
        return [*self.y_blocks, *self.layers]

    def tensor_plan(self) -> TensorPlan:
        """Attention is divided by heads, and the MLPs of blocks by their inner width. Modulations are whole."""
        attends = any(block.cross_attn is not None for block in self.layers)
        return TensorPlan(
            branches=[*_branches(self.y_blocks, of_text=True), *_branches(self.layers)],
            vocabulary=None,
            sizes={"heads": self.config["heads"]},
            positions=0,
            predicted=0,
            width=self.width,
            begins=None,
            ends=None,
            enters=[self.y_attended] if attends else [],
            reads=[self],
            lengths=self._lengths,
        )

    def _lengths(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        """Numbers of patches and of text positions, N and L."""
        height, width = batch["latents"].shape[2:]
        return height * width // self.patch_size**2, batch["text"].shape[1]

    def save(self, folder: Path) -> None:
        """Write config.json and safetensors."""
        save_network(folder, self, self.config, WEIGHTS)

    def load(self, folder: Path) -> None:
        """See `Denoiser.load`."""
        load_into(self, folder, self.config, _separated, WEIGHTS)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """See `Denoiser.open`."""
        return load_network(folder, cls, _separated, WEIGHTS)


class Block(nn.Module):
    """Self-attention and MLP modulated by the time (adaLN-Zero), with cross-attention to the text between them."""

    def __init__(self, width: int, heads: int, mlp_ratio: int, cross_attention: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(width, heads)
        self.cross_attn = CrossAttention(width, heads) if cross_attention else None
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(width, mlp_ratio * width, width, nn.GELU())
        self.adaLN_modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        """x (B, N, D) for text y (B, L, D) and the activated embedding of time and text c (B, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, dim=2)  # B1D each
        x = x + gate1 * self.attn(modulate(self.norm1(x), shift1, scale1))
        if self.cross_attn is not None:
            x = x + self.cross_attn(x, y)
        return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))


class TextBlock(nn.Module):
    """A pre-norm transformer block over the text."""

    def __init__(self, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp_ratio * width, width, nn.GELU())

    def forward(self, y: Tensor) -> Tensor:
        """y (B, L, D)."""
        y = y + self.attn(self.norm1(y))
        return y + self.mlp(self.norm2(y))


class FinalLayer(nn.Module):
    """From vectors of patches to their predictions."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """(B, N, out) for x (B, N, D) and c (B, D)."""
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=2)  # B1D each
        return self.linear(modulate(self.norm_final(x), shift, scale))


class SelfAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        # Not one stacked matrix: a part of the rows of each of these is a number of whole heads.
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, D)."""
        x = self.enter(x)
        q, k, v = (split(layer(x), self.head_width) for layer in (self.q, self.k, self.v))  # B(heads)Nd each
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def enter(self, x: Tensor) -> Tensor:
        """See `DividedBranch.module`."""
        return x


class CrossAttention(nn.Module):
    """Multi-head attention of patches to text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q_linear = nn.Linear(width, width)
        self.k_linear = nn.Linear(width, width)
        self.v_linear = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x (B, N, D) attends to y (B, L, D)."""
        q = split(self.q_linear(self.enter(x)), self.head_width)  # B(heads)Nd
        k, v = (split(layer(y), self.head_width) for layer in (self.k_linear, self.v_linear))  # B(heads)Ld each
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def enter(self, x: Tensor) -> Tensor:
        """See `DividedBranch.module`."""
        return x


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int, hidden: int, out: int, act: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = act
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) for x (..., width)."""
        return self.fc2(self.act(self.fc1(self.enter(x))))

    def enter(self, x: Tensor) -> Tensor:
        """See `DividedBranch.module`."""
        return x


def _branches(blocks: Iterable[nn.Module], of_text: bool = False) -> list[DividedBranch]:
    """How the attention and the MLP of blocks are divided."""
    found = []
    for module in (module for block in blocks for module in block.children()):
        match module:
            case SelfAttention():
                columns, rows = (module.q, module.k, module.v), module.proj
            case CrossAttention():
                columns, rows = (module.q_linear, module.k_linear, module.v_linear), module.proj
            case Mlp():
                columns, rows = (module.fc1,), module.fc2
            case _:
                continue
        # The gates of a block need what they multiply. Nothing needs the output of a text block's MLP.
        again = not (of_text and isinstance(module, Mlp))
        found.append(DividedBranch(module, None, columns, rows, of_text, again))
    return found


def split(x: Tensor, head_width: int) -> Tensor:
    """(B, N, heads d) -> (B, heads, N, d), for as many heads as there are."""
    return x.unflatten(2, (-1, head_width)).transpose(1, 2)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x * (1 + scale) + shift, for x (B, N, D) and the others (B, 1, D)."""
    return torch.addcmul(shift, x, 1 + scale)


def positions(values: Tensor, width: int) -> Tensor:
    """Sinusoidal embeddings (M, width), float32, of values (M,): cosines, then sines, of wavelengths up to 10,000."""
    half = width // 2
    rates = torch.exp(-math.log(10000) / half * torch.arange(half, device=values.device))
    angles = values.float()[:, None] * rates  # (M, width / 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def grid_positions(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Fixed embeddings (height * width, channels) of a grid: half of the channels are the row's, half the column's.

    They are computed on the device, because a copy from the host's memory would make the host wait in each pass.
    """
    rows = positions(torch.arange(height, device=device), channels // 2).repeat_interleave(width, dim=0)
    columns = positions(torch.arange(width, device=device), channels // 2).repeat(height, 1)
    return torch.cat([rows, columns], dim=1)
