"""What every objective of latent diffusion offers: a forward process, its training loss, and its samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from data.random_numbers import Draws
from recipes.models.family import NotInDiffusersError

# Letters: B batch, C latent channels, H W latent grid, L text positions, D text width.

# (noisy latents (B, C, H, W), times (B,)) -> the network's prediction (B, C, H, W)
Predict = Callable[[Tensor, Tensor], Tensor]
# (noisy latents (B, C, H, W), times (B,), text (B, L, D)) -> the network's prediction (B, C, H, W)
Denoise = Callable[[Tensor, Tensor, Tensor], Tensor]
GLOBAL = Draws()


class Objective(nn.Module, ABC):
    """Defines what a denoiser is trained to predict, at which noise levels, and how latents are sampled.

    An objective has no weights. Tables that depend only on the recipe are buffers that are not saved.

    Attributes:
        name: the component's name in a recipe. Exports record it.
        samplers: names of the samplers; the first is the default.
        prediction: what the network predicts, by diffusers' name for it (epsilon, v_prediction or flow_prediction);
            None: something that it has no name for.
        eval_times: the points of the forward process at which the validation loss is computed, in the objective's own
            unit (timesteps, or times between 0 and 1).
    """

    name: ClassVar[str]
    samplers: ClassVar[tuple[str, ...]]
    prediction: str | None = None
    eval_times: list[int] | list[float]

    @abstractmethod
    def draw(self, x0: Tensor, draws: Draws = GLOBAL) -> tuple[Tensor, Tensor]:
        """Noise (B, C, H, W) and times (B,) for a training batch x0 (B, C, H, W), by the numbers of `draws`."""

    @abstractmethod
    def forward(self, predict: Predict, x0: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The weighted squared error of each sample.

        Args:
            predict: the network, given the text.
            x0: (B, C, H, W), clean latents, float32.
            noise: (B, C, H, W), standard normal.
            times: (B,), in the unit of `eval_times`.

        Returns:
            (B,), float32.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the configuration for sampling as `scheduler_config.json`, in the format of diffusers' schedulers."""

    @classmethod
    @abstractmethod
    def open(cls, folder: Path) -> Self:
        """An objective for sampling, from a folder that `save` wrote."""

    def other_noise(self, scheduler: dict[str, Any]) -> list[str]:
        """Differences from the forward process that weights were trained with, one line each.

        Args:
            scheduler: what their scheduler_config.json holds, of the same `prediction`.
        """
        return []

    def for_diffusers(self) -> Any:
        """The default sampler as a scheduler of diffusers that `StableDiffusionPipeline` takes.

        Raises:
            NotInDiffusersError: diffusers has no such sampler, which is the default.
        """
        raise NotInDiffusersError(f"diffusers has no scheduler for the objective {self.name}")

    @abstractmethod
    def integrate(self, predict: Predict, noise: Tensor, steps: int, sampler: str) -> Tensor:
        """Latents (B, C, H, W) from noise of that shape, by one of the `samplers`. Called by `sample`."""

    @torch.no_grad()
    def sample(
        self,
        denoise: Denoise,
        noise: Tensor,
        text: Tensor,
        null_text: Tensor,
        steps: int,
        guidance: float,
        *,
        sampler: str | None = None,
    ) -> Tensor:
        """Latents from noise, with classifier-free guidance.

        Args:
            denoise: the network.
            noise: (B, C, H, W), standard normal.
            text: (B, L, D).
            null_text: (L, D), the embedding of the empty caption, by which training replaced dropped captions.
            steps: network evaluations, each with twice the batch if guided.
            guidance: weight of the text, see `guided`.
            sampler: one of `samplers`; None: the first.

        Returns:
            (B, C, H, W), normalised latents.

        Raises:
            ValueError: an unknown sampler, or a number of steps that it cannot take.
        """
        sampler = self.check_sampler(sampler)
        self.check_steps(steps, sampler)
        return self.integrate(guided(denoise, text, null_text, guidance), noise, steps, sampler)

    def check_sampler(self, sampler: str | None) -> str:
        """The name of a sampler, with the default for None.

        Raises:
            ValueError: the objective has no such sampler.
        """
        if sampler is not None and sampler not in self.samplers:
            raise ValueError(f"sampler: `{sampler}` is unknown to {self.name}; allowed: {', '.join(self.samplers)}")
        return self.samplers[0] if sampler is None else sampler

    def check_steps(self, steps: int, sampler: str) -> None:
        """Whether a sampler can take so many steps.

        Raises:
            ValueError: it cannot.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")


def guided(denoise: Denoise, text: Tensor, null_text: Tensor, guidance: float) -> Predict:
    """Classifier-free guidance (Ho and Salimans 2022): null + guidance * (text - null), in float32.

    Args:
        denoise: the network. It is called once with both texts, in a batch of twice the size.
        text: (B, L, D).
        null_text: (L, D).
        guidance: 1 gives the prediction for the text, without a second copy of the batch.
    """
    if guidance == 1.0:
        return lambda latents, times: denoise(latents, times, text).float()
    both = torch.cat([null_text.expand_as(text), text])

    def predict(latents: Tensor, times: Tensor) -> Tensor:
        prediction = denoise(torch.cat([latents, latents]), torch.cat([times, times]), both).float()
        null, conditioned = prediction.chunk(2)
        return null + guidance * (conditioned - null)

    return predict


def seeded_noise(seeds: list[int], shape: Any) -> Tensor:
    """Standard normal noise (B, *shape), float32, on the CPU.

    Each sample has its own generator, so that its noise depends neither on the batch nor on the device.
    """
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
