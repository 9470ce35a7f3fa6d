"""The discrete autoencoder of DALL-E as a training task."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.models.dvae.files import load_dvae_into, save_dvae
from recipes.models.dvae.loss import kl_to_uniform, logit_laplace, relax
from recipes.models.dvae.network import DOWNSAMPLE, DVAE, map_pixels, unmap_pixels
from recipes.models.task import Task


class DiscreteAutoencoder(Task):
    """DALL-E's dVAE (Ramesh et al. 2021, section 2.1): logit-Laplace likelihood, Gumbel-softmax, KL to uniform codes.

    The loss is (negative log-likelihood + beta * KL) / (3 R^2), both summed over an image of R x R pixels. The mean KL
    per grid position therefore has the weight beta / 192 relative to the mean negative log-likelihood per subpixel (one
    colour channel of one pixel).
    """

    scheduled = ("beta", "temperature")
    entry_points = ("reconstruct",)

    def __init__(
        self,
        *,
        codes: int = 8192,
        hidden: int = 256,
        blocks: int = 2,
        initial: int = 128,
        beta: float = 6.6,
        temperature: float = 1.0,
        least_scale: float = 0.0,
    ) -> None:
        """Build it with new weights. The default sizes are the published ones.

        Args:
            codes: size of the codebook.
            hidden: width of the encoder's first group. It doubles in each of the four groups; the decoder has the
                reverse.
            blocks: residual blocks per group.
            initial: width of the decoder's first layer.
            beta: weight of the KL divergence, unless a scheduled_value callback sets it.
            temperature: temperature of the relaxation, unless a scheduled_value callback sets it.
            least_scale: added to the scale b of the likelihood, in units of the pixels' logits; 0 as published.
                Drawings have flat areas, whose b goes to 0 and whose gradient (1 / b) then dominates all others.

        Raises:
            ValueError: a size or a number out of range.
        """
        super().__init__()
        if beta < 0 or temperature <= 0 or least_scale < 0:
            raise ValueError(
                f"dvae: beta {beta}, temperature {temperature}, least_scale {least_scale}: give 0 or more, and a "
                "temperature above 0"
            )
        self.network = DVAE(codes=codes, hidden=hidden, blocks=blocks, initial=initial)
        # Not in checkpoints: functions of the number of batches, which a schedule sets again after a resume.
        self.register_buffer("beta", torch.tensor(float(beta)), persistent=False)
        self.register_buffer("temperature", torch.tensor(float(temperature)), persistent=False)
        self.least_scale = least_scale
        self.codes = codes
        self.eval_names = ["loss", "nll", "kl", "psnr"]

    def check_scheduled(self, name: str, value: float) -> None:
        """See `Task.check_scheduled`: the temperature is a divisor, and beta a weight."""
        allowed, text = (value > 0, "a number above 0") if name == "temperature" else (value >= 0, "0 or more")
        if not allowed:
            raise ValueError(f"dvae: {name}: {value}; give {text}")

    def requirements(self) -> dict[str, int]:
        """The number of which the sides of images must be multiples."""
        return {"side_multiple": DOWNSAMPLE}

    def blocks(self) -> list[nn.Module]:
        """The residual blocks of encoder and decoder."""
        return self.network.blocks()

    def networks(self) -> list[nn.Module]:
        """Encoder and decoder, which are called one by one."""
        return [self.network.encoder, self.network.decoder]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The training loss, with codes relaxed by Gumbel noise from the device's global generator.

        Args:
            batch: `image` (B, 3, R, R) uint8.

        Returns:
            `total`, `nll` (nats per subpixel), `kl` (nats per grid position): scalars.
        """
        pixels = batch["image"].float() / 255  # (B, 3, R, R)
        logits = self.network.logits(pixels)  # (B, K, G, G)
        nll = self._likelihood(pixels, relax(logits, self.temperature))[0].mean()
        kl = kl_to_uniform(logits).mean()
        return {"total": nll + self.beta * kl * _places(logits, pixels), "nll": nll.detach(), "kl": kl.detach()}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The terms of the evidence lower bound with the most likely codes: without noise, and independent of beta.

        Returns:
            (B,) each: `nll` (nats per subpixel), `kl` (nats per grid position), `loss` (their sum at beta 1, nats per
            subpixel), `psnr` (dB, for pixels in [0, 1]). For callbacks also `codes` (B, G, G) int64.
        """
        pixels = batch["image"].float() / 255  # (B, 3, R, R)
        logits = self.network.logits(pixels)  # (B, K, G, G)
        codes = logits.argmax(dim=1)  # (B, G, G)
        nll, mean = self._likelihood(pixels, codes)  # (B, 3, R, R) each
        nll = nll.mean(dim=(1, 2, 3))
        kl = kl_to_uniform(logits).mean(dim=(1, 2))
        error = unmap_pixels(torch.sigmoid(mean)) - pixels
        psnr = -10 * error.square().mean(dim=(1, 2, 3)).clamp(min=1e-10).log10()
        return {"loss": nll + kl * _places(logits, pixels), "nll": nll, "kl": kl, "psnr": psnr, "codes": codes}

    def _likelihood(self, pixels: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood in nats, and mu, per subpixel: (B, 3, R, R) each."""
        mean, log_scale = self.network.statistics(codes)
        if self.least_scale > 0:
            log_scale = torch.logaddexp(log_scale, torch.full_like(log_scale, math.log(self.least_scale)))
        return -logit_laplace(map_pixels(pixels), mean, log_scale), mean

    def reconstruct(self, images: Tensor) -> Tensor:
        """Images (B, 3, R, R) in [-1, 1], encoded to the most likely codes and decoded again."""
        return self.network.decode(self.network.tokens((images + 1) / 2)) * 2 - 1

    def export(self, folder: Path) -> None:
        """Write config.json and two safetensors in the public release's layout, which `load_dvae` opens."""
        save_dvae(self.network, folder)

    def load_export(self, folder: Path) -> None:
        """See `Task.load_export`. A folder in the public release's layout is loaded too."""
        load_dvae_into(self.network, folder)


def _places(logits: Tensor, pixels: Tensor) -> float:
    """Grid positions per subpixel: 1 / 192."""
    return logits[0, 0].numel() / pixels[0].numel()
