"""Convolutions in the memory order that tensor cores (and oneDNN) take, and diffusers' blocks that keep to it."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from diffusers import UNet2DConditionModel
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.models.dvae.network import CodeEncoder

# Letters: B batch, C D channels, H W grid, T timestep embedding. Pictures are channels_last: in memory (B, H, W, C).

INDEX_LIMIT = 2**31 - 1  # PyTorch's kernel that enlarges channels_last pictures refuses an output of so many values


class ResidualBlock(ResnetBlock2D):
    """The residual block, without the copy of its input that diffusers makes for the shortcut in training.

    It avoids DDP's warning of gradients in another order than their parameters; these are of size 1 where they differ.
    """

    def forward(self, x: Tensor, temb: Tensor | None = None) -> Tensor:
        """(B, C, H, W) and (B, T) to (B, D, H, W)."""
        h = self.conv1(self.nonlinearity(self.norm1(x)))  # (B, D, H, W)
        if self.time_emb_proj is not None:
            temb = temb if self.skip_time_act else self.nonlinearity(temb)
            h = h + self.time_emb_proj(temb)[:, :, None, None]
        h = self.conv2(self.dropout(self.nonlinearity(self.norm2(h))))
        sum_of_both = self.conv_shortcut(x) + h
        return sum_of_both if self.output_scale_factor == 1 else sum_of_both / self.output_scale_factor


class SpatialTransformer(Transformer2DModel):
    """The transformer over a picture, without the copy of its output into rows of single channels.

    That copy costs two passes over memory, and what follows it (skip connections, norms) would go on in its order.
    """

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        """(B, H W, C) tokens and the block's input (B, C, H, W) to (B, C, H, W)."""
        if self.use_linear_projection:
            hidden_states = self.proj_out(hidden_states)
        picture = hidden_states.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)
        return (picture if self.use_linear_projection else self.proj_out(picture)) + residual


class Enlargement(Upsample2D):
    """Doubles the grid; only outputs that PyTorch's kernel cannot index are copied, not every batch of 64 or more."""

    def forward(self, hidden_states: Tensor, output_size: int | None = None) -> Tensor:
        """(B, C, H, W) to (B, D, 2H, 2W), or to the grid `output_size`."""
        size = [2 * side for side in hidden_states.shape[2:]] if output_size is None else list(output_size)
        if hidden_states.shape[0] * hidden_states.shape[1] * size[0] * size[1] >= INDEX_LIMIT:
            hidden_states = hidden_states.contiguous()
        hidden_states = F.interpolate(hidden_states, size=size, mode="nearest")  # (B, C, 2H, 2W)
        return getattr(self, self.name)(hidden_states) if self.use_conv else hidden_states


def use_channels_last(module: nn.Module) -> int:
    """Put weights into channels_last and remove what leads out of it; returns the number of blocks that were changed.

    Blocks stay the same objects, with the same parameters and names, and change their class. Networks turn their
    pictures once, as they come in.

    Raises:
        ValueError: the model has no convolution.
    """
    if not any(parameter.dim() == 4 for parameter in module.parameters()):
        raise ValueError("channels_last: the model has no convolution of pictures to change")
    module.to(memory_format=torch.channels_last)
    changed = 0
    for block in module.modules():
        if isinstance(block, (UNet2DConditionModel, Encoder, Decoder)):
            block.conv_in.register_forward_pre_hook(_turn)
        elif isinstance(block, CodeEncoder):
            block.blocks.input.register_forward_pre_hook(_turn)
        kind = _without_copies(block)
        if kind is not None:
            block.__class__ = kind
            changed += 1
    return changed


def _without_copies(block: nn.Module) -> type[nn.Module] | None:
    """The class that a block changes to; None where it has nothing to change, or is of a kind with other steps."""
    kind = type(block)
    if kind is ResnetBlock2D and block.conv_shortcut is not None:
        adds = block.time_embedding_norm == "default" or block.time_emb_proj is None  # the timestep, or nothing
        return ResidualBlock if adds and block.upsample is None and block.downsample is None else None
    if kind is Transformer2DModel and block.is_input_continuous:
        return SpatialTransformer
    if kind is Upsample2D and block.norm is None and not block.use_conv_transpose and block.interpolate:
        return Enlargement
    return None


def _turn(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # Its weights may have another order (FSDP's shards do): the first picture then decides for all that follow.
    return (inputs[0].contiguous(memory_format=torch.channels_last), *inputs[1:])


class ChannelsLast(Algorithm):
    """Convolutions with the channels innermost in memory: faster kernels on tensor cores and CPUs, without copies."""

    def __init__(self, task: nn.Module) -> None:
        """See `use_channels_last`."""
        self.task = task

    def match(self, event: Event, state: State) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        changed = use_channels_last(self.task)
        print(f"channels_last: {changed} blocks without copies", flush=True)
        logger.log_hyperparameters({"channels_last": changed})
