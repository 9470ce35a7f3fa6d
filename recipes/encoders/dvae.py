"""DALL-E's discrete autoencoder as a frozen encoder: images to a grid of codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor, nn

from data.aliases import InputPath
from recipes.encoders.base import TokenEncoder
from recipes.models.dvae.files import load_dvae
from recipes.models.dvae.network import DOWNSAMPLE
from recipes.models.sampling import Precision


def dvae(
    *,
    path: InputPath,
    precision: Literal["fp16", "bf16", "fp32"] = "fp32",
    channels_last: bool = True,
) -> DVAEEncoder:
    """A dVAE that a training run exported, or one in a public layout, with or without a decoder. Nothing is unpickled.

    The token at each grid position is the most likely code. If two codes are almost equally likely, another precision,
    device or batch size can change the choice by rounding.

    Args:
        path: a local folder with the dVAE's files (see `recipes.models.dvae.files.load_dvae`).
        precision: number format of inference; on a CPU fp16 becomes fp32. The logits, and the convolution that computes
            them, are always fp32.
        channels_last: use the channels_last memory format, which is faster in half precision on GPUs.

    Raises:
        FileNotFoundError: the folder lacks one of its files.
        ValueError: the files are those of another model.
    """
    folder = Path(path).expanduser()

    def load() -> nn.Module:
        network = load_dvae(folder)
        return network.to(memory_format=torch.channels_last) if channels_last else network

    return DVAEEncoder(load, str(path), precision)


class DVAEEncoder(TokenEncoder):
    """See `dvae`."""

    def __init__(self, load: Callable[[], nn.Module], id: str, precision: Precision) -> None:
        super().__init__(load, id, precision)
        self.downsample = DOWNSAMPLE
        self.codes = self.module.codes
        self._head = {name: tensor.clone() for name, tensor in self._output().state_dict().items()}
        if self.codes > 1 << 16:
            raise ValueError(
                f"image_encoder.path: {id} has {self.codes} codes; the stored format, uint16, holds at most 65,536"
            )

    def to(self, device: str | torch.device) -> Self:
        """As `FrozenEncoder.to`, but the convolution of the logits keeps its weights in float32, as in training."""
        super().to(device)
        self._output().float().load_state_dict(self._head)
        return self

    def _output(self) -> nn.Module:
        return self.module.encoder.blocks.output.conv

    def need_decoder(self) -> None:
        """See `TokenEncoder.need_decoder`."""
        if self.module.decoder is None:
            raise ValueError(
                f"image_encoder.path: {self.id} holds the encoder of a dVAE alone, which makes tokens, and no decoder "
                "to make images of them; encode with a folder that holds both (docs/dalle.md)"
            )

    @torch.no_grad()
    def logits(self, images: Tensor, exact: bool = False) -> Tensor:
        """See `TokenEncoder.logits`."""
        return self._network(exact)[0].logits(images.float().div(255.0))

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """See `TokenEncoder.decode`. Images that overflow in 16 bits are computed in fp32, as those of a VAE are."""
        self.need_decoder()
        images = self._network(exact=False)[0].decode(tokens)
        if self.precision != "fp32":
            for row in (~images.isfinite().flatten(1).all(1)).nonzero().flatten().tolist():
                images[row] = self._network(exact=True)[0].decode(tokens[row : row + 1])[0]
        return images
