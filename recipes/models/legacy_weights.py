"""Weights of versions in which parameters had other names or shapes.

Queries, keys and values, or keys and values, were rows of one matrix. `autoregressive` had one matrix `qkv` for all
three of them. The denoiser `dit` had that for self-attention, as the published DiT has, and one matrix `kv_linear` for
the keys and values of cross-attention, as PixArt-alpha has.

`contrastive_text` had the scalar `logit_scale` of open_clip in its network.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

# Other models may have an `attn.qkv` of their own, which stays.
PLACES = r".*\bbranch|.*\bdenoiser\.(?:layers\.\d+\.attn|layers\.\d+\.cross_attn|y_blocks\.\d+\.attn|y_pool)"
STACKED = re.compile(rf"({PLACES})\.(qkv|kv_linear)\.(weight|bias)")
PARTS = {"qkv": ("q", "k", "v"), "kv_linear": ("k_linear", "v_linear")}
SCALE = re.compile(r"(task\.)?network\.logit_scale")


def separate_names(name: Any) -> list[str] | None:
    """The names of a stacked parameter's two or three parts, or of the scalar's tensor; None: it is neither."""
    if not isinstance(name, str):
        return None
    if match := SCALE.fullmatch(name):
        return [f"{match[1] or ''}logit_scale.log"]
    match = STACKED.fullmatch(name)
    return None if match is None else [f"{match[1]}.{part}.{match[3]}" for part in PARTS[match[2]]]


def part_of(tensor: Tensor, number: int, parts: int) -> Tensor:
    """The rows of one of a stacked parameter's parts, or the scalar with one dimension, in memory of their own."""
    return (tensor if tensor.ndim else tensor.reshape(1)).chunk(parts)[number].clone()


def separated(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """A network's tensors with two or three matrices in the place of each stacked one.

    Args:
        tensors: by their names in the network.
        prefix: what the names of a task's tensors have before those of the network, such as "denoiser.".
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        names = separate_names(prefix + name)
        if names is None:
            found[name] = tensor
        else:
            found |= {n.removeprefix(prefix): part_of(tensor, i, len(names)) for i, n in enumerate(names)}
    return found
