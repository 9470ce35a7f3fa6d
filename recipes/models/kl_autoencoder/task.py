"""The KL-regularised autoencoder of latent diffusion as a training task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from data.ranges import check_least
from recipes.models.task import Task
from recipes.models.weights import load_diffusers

MEASURED = 16  # images by whose latents averaged weights are compared with those of training


class KLAutoencoder(Task):
    """AutoencoderKL (Rombach et al. 2022, section 3.1) by absolute error and KL, without perceptual or GAN loss."""

    entry_points = ("reconstruct", "measure")

    def __init__(
        self,
        *,
        channels: list[int],
        blocks: int = 2,
        latent_channels: int = 4,
        norm_groups: int = 32,
        middle_attention: bool = True,
        kl_weight: float = 1e-6,
    ) -> None:
        """Build it with new weights.

        Args:
            channels: width of each level. The grid halves between levels: n levels divide the side by 2^(n-1).
            blocks: residual blocks per level.
            latent_channels: channels of the latents.
            norm_groups: groups of every GroupNorm.
            middle_attention: whether there is self-attention at the smallest grid.
            kl_weight: weight of the KL divergence per latent value, relative to the absolute error per pixel value. Of
                Stable Diffusion's autoencoder it is 1e-6 for sums over an image, which at f = 8 is 2e-8 here.

        Raises:
            ValueError: a number out of range, or a width that is not a multiple of norm_groups.
        """
        super().__init__()
        check_least("kl_autoencoder", 1, channels=min(channels, default=0), blocks=blocks, norm_groups=norm_groups)
        check_least("kl_autoencoder", 1, latent_channels=latent_channels)
        check_least("kl_autoencoder", 0, kl_weight=kl_weight)
        if any(width % norm_groups for width in channels):
            raise ValueError(f"kl_autoencoder: channels {channels} must be multiples of norm_groups ({norm_groups})")
        levels = len(channels)
        self.network = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(channels),
            layers_per_block=blocks,
            latent_channels=latent_channels,
            norm_num_groups=norm_groups,
            mid_block_add_attention=middle_attention,
        )
        self.kl_weight = kl_weight
        self.eval_names = ["loss", "l1", "psnr"]
        # First and second moment of the latents, for the scaling factor in the export, and of how many microbatches.
        self.register_buffer("latent_moments", torch.tensor([0.0, 1.0]))
        self.register_buffer("latent_batches", torch.tensor(0.0))

    def requirements(self) -> dict[str, int]:
        """The number of which the sides of images must be multiples: the grid halves between levels."""
        return {"side_multiple": 2 ** (len(self.network.config.block_out_channels) - 1)}

    def blocks(self) -> list[nn.Module]:
        """One block per level of encoder and decoder, and their middle blocks."""
        encoder, decoder = self.network.encoder, self.network.decoder
        return [*encoder.down_blocks, encoder.mid_block, decoder.mid_block, *decoder.up_blocks]

    def networks(self) -> list[nn.Module]:
        """Encoder and decoder, which are called one by one."""
        return [self.network.encoder, self.network.decoder]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The training loss, with latents drawn from the posterior.

        Args:
            batch: `image` (B, 3, H, W) uint8.

        Returns:
            `total`, `l1` (per pixel value, for pixels in [-1, 1]) and `kl` (nats per latent value): scalars.
        """
        images = to_signed(batch["image"])
        # In 32 bits: the divergence is a small difference of larger numbers, and its sum may be above all 16-bit ones.
        posterior = DiagonalGaussianDistribution(self.network.encode(images).latent_dist.parameters.float())
        latents = posterior.sample()
        if self.training:
            self._track(latents.detach())
        l1 = (self.network.decode(latents).sample.float() - images).abs().mean()
        kl = posterior.kl().sum() / latents.numel()
        return {"total": l1 + self.kl_weight * kl, "l1": l1.detach(), "kl": kl.detach()}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Reconstruction from the posterior's mean: `l1`, `psnr` (dB), and `loss`, which is the l1: (B,) each."""
        images = to_signed(batch["image"])
        error = self.reconstruct(images) - images
        l1 = error.abs().mean(dim=(1, 2, 3))
        psnr = -10 * (error / 2).square().mean(dim=(1, 2, 3)).clamp(min=1e-10).log10()
        return {"loss": l1, "l1": l1, "psnr": psnr}

    def reconstruct(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1], encoded to the posterior's mean and decoded again."""
        return self.network.decode(self.network.encode(images).latent_dist.mode()).sample.float().clamp(-1, 1)

    def _track(self, latents: Tensor) -> None:
        moments = _moments(latents)
        # Training goes on after a batch that is not finite, whose moments would stay in the average for ever.
        finite = moments.isfinite().all()
        self.latent_batches += finite
        # A plain mean over the first 100 microbatches, so that a short run is not biased by the initial values.
        weight = torch.clamp(1 / self.latent_batches, min=0.01, max=1.0)
        self.latent_moments.lerp_(torch.where(finite, moments, self.latent_moments), weight)

    def measure(self, batch: dict[str, Tensor]) -> Tensor:
        """First and second moment of the latents of some images, (2,) float32. See `Task.measure`."""
        images = batch["image"][:MEASURED]  # a batch may fit on a device only as microbatches
        images = to_signed(images.to(self.latent_moments.device))
        posterior = DiagonalGaussianDistribution(self.network.encode(images).latent_dist.parameters.float())
        mean, square = _moments(posterior.mean)
        return torch.stack([mean, square + posterior.var.mean()])  # of what is drawn from it

    @contextmanager
    def measured(self, before: Tensor, after: Tensor) -> Iterator[None]:
        """See `Task.measured`. One batch alone says too little of all: what is taken from it is how much the mean and
        the deviation of its latents differ."""
        kept = self.latent_moments.clone()
        (mean, variance), (old, old_variance), (new, new_variance) = (
            (moments[0], moments[1] - moments[0] ** 2) for moments in (kept, before, after)
        )
        mean = mean + new - old
        self.latent_moments.copy_(torch.stack([mean, variance * new_variance / old_variance + mean**2]))
        try:
            yield
        finally:
            self.latent_moments.copy_(kept)

    def export(self, folder: Path) -> None:
        """Write config.json and safetensors for diffusers' `AutoencoderKL.from_pretrained`.

        The scaling factor gives the latents of the first rank's last microbatches (an average over about 100) a
        standard deviation of 1. For averaged weights, see `measured`.
        """
        mean, square = self.latent_moments.tolist()
        scale = (square - mean**2) ** -0.5
        self.network.register_to_config(scaling_factor=round(scale, 5), shift_factor=round(mean, 5))
        self.network.save_pretrained(str(folder), safe_serialization=True)

    def load_export(self, folder: Path) -> None:
        """See `Task.load_export`. The folder may also be a whole pipeline of diffusers."""
        load_diffusers(self.network, folder, "vae")


def _moments(latents: Tensor) -> Tensor:
    return torch.stack([latents.mean(), latents.square().mean()])


def to_signed(images: Tensor) -> Tensor:
    """Images uint8 (..., H, W) to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1
