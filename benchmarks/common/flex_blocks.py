"""FlexAttention's blocks: the pairs that they compute, and attention with fewer keys per block than in recipes."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx

from recipes.models.autoregressive.flex import BLOCK, FlexAttention, block_mask
from recipes.models.autoregressive.masks import Kind, TokenLayout, dense_mask, visible, visible_by_columns
from recipes.models.autoregressive.sparse_attention import FlexColumns, FlexRaster

NARROW = (128, 64)  # queries and keys per block
# Tiles that fit into such blocks, for heads of width 64.
TILES = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_TILES = {"BLOCK_M1": 64, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64, "num_warps": 4, "num_stages": 3}
# PyTorch compares the blocks with its own choice of tiles before it reads the options: on Hopper 128 keys in the
# forward (torch 2.7) or the backward pass (2.11), and fails. While it searches, it only skips the choices that do not
# fit. Those that are left all get the tiles above, so that little is searched.
SEARCH = {"max_autotune": True}


def block_share(kind: Kind, layout: TokenLayout, block: tuple[int, int] = BLOCK) -> float:
    """Pairs in blocks with at least one visible pair, in FlexAttention's token order, relative to those in the 128 x
    128 blocks of a causal mask.

    Args:
        kind: kind of the mask.
        layout: positions of the sequence.
        block: queries and keys per block.
    """
    causal = torch.ones(layout.length, layout.length).tril()
    return _computed(dense_mask(_sees(kind, layout), layout.length).float(), block) / _computed(causal, BLOCK)


def _computed(mask: torch.Tensor, block: tuple[int, int]) -> float:
    return nn.functional.max_pool2d(mask[None], block, ceil_mode=True).sum().item() * block[0] * block[1]


def _sees(kind: Kind, layout: TokenLayout):
    return visible_by_columns(layout) if kind == "column" else visible(kind, layout)


def narrow_attend(kind: Kind, layout: TokenLayout, device: torch.device) -> FlexRaster | FlexColumns:
    """The attention of recipes with blocks of `NARROW`. Needs a GPU."""
    backend = partial(compile_fx, config_patches=SEARCH)
    attend = FlexColumns(layout, device, backend) if kind == "column" else FlexRaster(kind, layout, device, backend)
    attend.flex = FlexAttention(block_mask(_sees(kind, layout), layout.length, device, NARROW), backend)
    attend.flex.options = {f"fwd_{name}": value for name, value in TILES.items()}
    attend.flex.options |= {f"bwd_{name}": value for name, value in BACKWARD_TILES.items()}
    return attend
