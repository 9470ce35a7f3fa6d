"""Convolution weights and images in channels_last memory format, which tensor cores and oneDNN compute fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from data.system.log import log
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.run import Run


def use_channels_last(module: nn.Module) -> int:
    """Convert a model to channels_last; returns the number of convolution weights.

    Networks convert their input once, at their first convolution. PyTorch's convolutions and pointwise operations keep
    the format from there on; modules that ask for contiguous memory, as some of diffusers do, copy.

    Raises:
        ValueError: the model has no convolution.
    """
    # Here, so that a run without this lever, which asks `uses_channels_last`, does not wait for them.
    from diffusers import UNet2DConditionModel
    from diffusers.models.autoencoders.vae import Decoder, Encoder

    from recipes.models.dvae.network import CodeEncoder

    convolutions = sum(parameter.dim() == 4 for parameter in module.parameters())
    if not convolutions:
        raise ValueError("channels_last: the model has no convolution over images to change; remove the lever")
    module.to(memory_format=torch.channels_last)
    for network in module.modules():
        if isinstance(network, (UNet2DConditionModel, Encoder, Decoder)):
            network.conv_in.register_forward_pre_hook(_convert_input)
        elif isinstance(network, CodeEncoder):
            network.blocks.input.register_forward_pre_hook(_convert_input)
    return convolutions


def uses_channels_last(module: nn.Module) -> bool:
    """Whether `use_channels_last` has changed a network in this module, also if its weights were divided since."""
    return any(hook is _convert_input for child in module.modules() for hook in child._forward_pre_hooks.values())


def _convert_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # Weights alone do not decide the format: FSDP gathers its shards in contiguous memory.
    return (inputs[0].contiguous(memory_format=torch.channels_last), *inputs[1:])


class ChannelsLast(Lever):
    """Stores convolution weights and images with the channels innermost: faster convolutions on tensor cores."""

    def __init__(self, task: Task) -> None:
        """See `use_channels_last`."""
        self.task = task

    def change_modules(self, run: Run) -> None:
        convolutions = use_channels_last(self.task)
        log.info(f"channels_last: {convolutions} convolutions")
        run.log_settings({"channels_last": convolutions})
