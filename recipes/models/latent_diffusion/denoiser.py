"""What every denoiser of latent diffusion offers: a network over latents, and its files in an export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor, nn

from recipes.models.family import NotInDiffusersError
from recipes.models.tensor_plan import TensorPlan


class Denoiser(nn.Module, ABC):
    """A network that predicts noise or a velocity from noisy latents, their time and a text embedding.

    Attributes:
        name: the component's name in a recipe. Exports record it.
        folder: the folder of the weights in an export; averaged weights lie in `<folder>_ema`.
        latent_channels: channels of the latents, C.
        text_width: width of the text embedding, D.
        grid_multiple: the sides of the latent grid must be multiples of this.
    """

    name: ClassVar[str]
    folder: ClassVar[str]
    latent_channels: int
    text_width: int
    grid_multiple: int = 1

    @abstractmethod
    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """The prediction that the objective defines.

        Args:
            latents: (B, C, H, W), noisy.
            times: (B,), from 0 (clean) to about 1,000 (noise); integers or floating-point numbers.
            text: (B, L, D).

        Returns:
            (B, C, H, W).
        """

    def blocks(self) -> list[nn.Module]:
        """See `Task.blocks`."""
        return []

    def recomputed_blocks(self) -> list[nn.Module]:
        """See `Task.recomputed_blocks`."""
        return self.blocks()

    def tensor_plan(self) -> TensorPlan | None:
        """See `Task.tensor_plan`."""
        return None

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write config.json and safetensors."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote into this network, strictly.

        Raises:
            FileNotFoundError: the folder holds no such weights.
            ValueError: the tensors are not those of this network.
        """

    @classmethod
    @abstractmethod
    def open(cls, folder: Path) -> Self:
        """A new network from what `save` wrote."""

    def for_diffusers(self) -> nn.Module:
        """The network as diffusers' `StableDiffusionPipeline` takes it for its `unet`.

        Raises:
            NotInDiffusersError: diffusers has no such network, which is the default.
        """
        raise NotInDiffusersError(f"diffusers has no pipeline for the denoiser {self.name}")
