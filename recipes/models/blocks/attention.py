"""Attention of diffusers' networks on views of (B, S, H, D) instead of copies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.models.blocks.formats import format_of

# Letters: B batch, S positions, H heads, D width of a head, C = H D.

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# (query, key, value), (B, S, H, D) each -> (B, S, H, D)
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's attention. Its kernels take and give the transposed views as they are."""
    views = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*views).transpose(1, 2)


def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's attention without the kernels of cuDNN, which newer versions prefer on newer GPUs."""
    with sdpa_kernel(WITHOUT_CUDNN):
        return sdpa(query, key, value)


def xformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The memory-efficient attention of xformers."""
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention(query, key, value)


class AttentionOnViews:
    """A processor of diffusers' attention blocks that copies nothing.

    Diffusers' processor for xformers copies query, key, value and result, each into a batch of B H; its processors
    divide the result by a factor that is 1. Pictures stay in their memory format.
    """

    def __init__(self, kernel: Kernel) -> None:
        """
        Args:
            kernel: computes the attention.
        """
        self.kernel = kernel

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """The block's result for (B, S, C), or (B, C, h, w), and a text (B, L, E), if there is one."""
        if attention_mask is not None:  # as a model of one's own may have
            masked = FlashProcessor() if self.kernel is flash else AttnProcessor2_0()
            return masked(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        x = hidden_states
        if attn.group_norm is not None:
            x = attn.group_norm(x) if x.ndim == 4 else attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        if x.ndim == 4:
            x = x.flatten(2).transpose(1, 2)  # (B, S, C)
        source = x if encoder_hidden_states is None else encoder_hidden_states
        batch, heads, width = x.shape[0], attn.heads, attn.inner_dim // attn.heads
        query, key, value = (
            layer(tensor).view(batch, tensor.shape[1], heads, width)  # (B, S, H, D)
            for layer, tensor in ((attn.to_q, x), (attn.to_k, source), (attn.to_v, source))
        )
        y = self.kernel(query, key, value).flatten(2)  # (B, S, C)
        linear, dropout = attn.to_out
        y = dropout(linear(y))
        if hidden_states.ndim == 4:
            y = y.transpose(1, 2).unflatten(2, hidden_states.shape[2:])
            y = y.contiguous(memory_format=format_of(hidden_states))
        y = y + hidden_states if attn.residual_connection else y
        return y if attn.rescale_output_factor == 1 else y / attn.rescale_output_factor


# Diffusers asks for it in each call of a block. Python takes five times as long to read it off the code.
AttentionOnViews.__call__.__signature__ = inspect.signature(AttentionOnViews.__call__)


class FlashProcessor(AttnProcessor2_0):
    """Diffusers' processor for PyTorch's attention, as `flash`: for blocks that `AttentionOnViews` does not know."""

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        """See `AttnProcessor2_0`."""
        with sdpa_kernel(WITHOUT_CUDNN):
            return super().__call__(*arguments, **options)


def takes(attn: Attention) -> bool:
    """Whether `AttentionOnViews` can compute a block: one without the options of other families of networks."""
    options = ("spatial_norm", "norm_q", "norm_k", "norm_cross", "added_kv_proj_dim")
    return (
        type(attn.to_q) is type(attn.to_k) is nn.Linear
        and attn.scale_qk
        and not attn.is_causal
        and attn.inner_dim == attn.inner_kv_dim
        and not any(getattr(attn, option) for option in options)
    )
