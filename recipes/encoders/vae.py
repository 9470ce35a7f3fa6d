"""KL autoencoders of diffusers: Stable Diffusion's, or one trained here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from recipes.encoders.base import LatentEncoder, ModelPath
from recipes.encoders.loading import cannot_load, of_hub
from recipes.models.config_files import build_from
from recipes.models.json_files import is_number, read_object
from recipes.models.sampling import Precision
from recipes.models.weights import read_safetensors

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"  # of a folder of diffusers


def kl_vae(
    *,
    path: ModelPath,
    subfolder: str | None = None,
    revision: str | None = None,
    precision: Literal["fp16", "bf16", "fp32"] = "fp16",
    channels_last: bool = True,
    fused: bool = True,
    compiled: bool = False,
    slicing: bool = False,
) -> KLVae:
    """A KL autoencoder of diffusers (`AutoencoderKL`). Only safetensors are read.

    Args:
        path: hub id (owner/name), or a local folder with config.json and diffusion_pytorch_model.safetensors.
        subfolder: folder inside of `path`, such as "vae" in a whole pipeline.
        revision: branch, tag or commit of a hub id.
        precision: number format of inference; on a CPU fp16 becomes fp32.
        channels_last: use the channels_last memory format, which is faster in half precision on GPUs.
        fused: compute each GroupNorm with its SiLU in one kernel on GPUs (in channels_last), attention on views, and
            residual blocks without copies; results differ in rounding.
        compiled: compile the encoder's network with torch.compile when it first encodes, once for each size of batches.
        slicing: encode one image at a time, to save memory at high resolutions.

    Raises:
        FileNotFoundError: a local folder lacks one of its files.
        ValueError: a VAE of another class, that normalises its latents per channel, lacks weights or layers for them,
            or cannot be loaded.
    """
    from diffusers import AutoencoderKL

    folder = Path(path).expanduser() / (subfolder or "")
    local = Path(path).expanduser().is_dir()
    if local:
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"image_encoder.path: no file {folder / name}: name a diffusers VAE folder")

    id = path if subfolder is None else f"{path}/{subfolder}"

    def load() -> nn.Module:
        source = {"local_files_only": True} if local else {"subfolder": subfolder, "revision": revision}

        def opened(config: dict[str, Any] | None = None) -> tuple[nn.Module, dict[str, Any]]:
            return AutoencoderKL.from_pretrained(
                str(folder) if local else path,
                use_safetensors=True,
                low_cpu_mem_usage=False,
                output_loading_info=True,
                **source,
            )

        try:
            if local:
                config = read_object(folder / CONFIG)
            else:
                config = of_hub("image_encoder.path", path, lambda: dict(AutoencoderKL.load_config(path, **source)))
            kind = config.get("_class_name", AutoencoderKL.__name__)
            if kind != AutoencoderKL.__name__:  # diffusers would open it as one, without what only the other class has
                raise ValueError(f"image_encoder.path: {id} has the class {kind!s:.50}; name an AutoencoderKL")
            if local:
                vae, found = build_from(folder / CONFIG, opened, read_safetensors(folder / WEIGHTS))
            else:
                vae, found = of_hub("image_encoder.path", path, opened)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise cannot_load("image_encoder.path", path, error) from error
        if missing := found["missing_keys"]:  # diffusers draws random numbers for them
            raise ValueError(f"image_encoder.path: {path} lacks weights, such as {sorted(missing)[0]}; copy it again")
        if left := found["unexpected_keys"]:  # diffusers goes on with the network that is left
            raise ValueError(
                f"image_encoder.path: {path} has weights that its {CONFIG} has no layers for, such as "
                f"{sorted(left)[0]}; copy it again"
            )
        vae.use_slicing = slicing
        if fused:
            fuse(vae, norms=channels_last)
        if compiled:
            vae.encoder.compile(dynamic=False)
        return vae.to(memory_format=torch.channels_last) if channels_last else vae

    return KLVae(load, id, precision)


def fuse(vae: nn.Module, norms: bool) -> None:
    """Change a diffusers autoencoder in place, so that it computes the same with fewer kernels and copies.

    Args:
        vae: an `AutoencoderKL`, whose weights and their names stay.
        norms: also compute GroupNorm and SiLU in one kernel, which takes channels_last.
    """
    from diffusers.models.attention_processor import Attention

    from recipes.models.blocks.attention import AttentionOnViews, sdpa, takes
    from recipes.models.blocks.lean import make_lean
    from recipes.models.blocks.norms import fuse_group_norms

    make_lean(vae)
    for block in vae.modules():
        if isinstance(block, Attention) and takes(block):
            block.set_processor(AttentionOnViews(sdpa))
    if norms:
        fuse_group_norms(vae, measured=False)


class KLVae(LatentEncoder):
    """See `kl_vae`."""

    def __init__(self, load: Callable[[], nn.Module], id: str, precision: Precision) -> None:
        super().__init__(load, id, precision)
        config = self.module.config
        if config.get("latents_mean") is not None or config.get("latents_std") is not None:
            raise ValueError(
                f"image_encoder.path: {id} normalises its latents per channel (latents_mean, latents_std), which is "
                "not supported; use a VAE with scaling_factor"
            )
        self.channels = int(config.latent_channels)
        self.downsample = 2 ** (len(config.block_out_channels) - 1)
        scaling, shift = config.scaling_factor, config.shift_factor or 0.0
        if not (is_number(scaling) and scaling and is_number(shift)):
            raise ValueError(
                f"image_encoder.path: {id} has scaling_factor {scaling!r:.50} and shift_factor {shift!r:.50}; give a "
                "number other than 0, and a number"
            )
        self.scaling_factor, self.shift_factor = float(scaling), float(shift)

    @torch.no_grad()
    def encode(self, images: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
        """See `LatentEncoder.encode`."""
        vae, dtype = self._network(exact)
        pixels = images.float().div_(127.5).sub_(1.0).to(dtype)  # B3HW in [-1, 1]
        moments = vae.encode(pixels).latent_dist.parameters.float()  # B(2C)hw
        mean, log_variance = moments.chunk(2, dim=1)
        # Clamped as in diffusers' DiagonalGaussianDistribution; in float32, because fp16 would round the exponential.
        std = log_variance.clamp(-30.0, 20.0).mul(0.5).exp()
        return (mean - self.shift_factor) * self.scaling_factor, std * self.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See `LatentEncoder.decode`.

        As in the encode job, images that overflow in 16 bits (those of SDXL's VAE do in fp16) are computed in fp32, one
        by one, since that takes twice the memory. They would be black.
        """
        raw = latents.float() / self.scaling_factor + self.shift_factor
        pixels = self._pixels(raw, exact=False)
        if self.precision != "fp32":
            overflowed = raw.isfinite().flatten(1).all(1) & ~pixels.isfinite().flatten(1).all(1)
            for row in overflowed.nonzero().flatten().tolist():
                pixels[row] = self._pixels(raw[row : row + 1], exact=True)[0]
        return pixels.add(1.0).div(2.0).clamp(0.0, 1.0)

    def _pixels(self, raw: Tensor, exact: bool) -> Tensor:
        """Images float32 (B, 3, H, W) in about [-1, 1] of latents as the network has them; `exact` as in `store`."""
        vae, dtype = self._network(exact)
        return vae.decode(raw.to(dtype)).sample.float()

    @torch.no_grad()
    def for_diffusers(self) -> nn.Module:
        """See `LatentEncoder.for_diffusers`.

        The shift moves into the 1 x 1 convolutions on both sides of the latents, so that pictures stay the same. A VAE
        without them, as those of Stable Diffusion 3 and FLUX, gets convolutions that change nothing else.
        """
        vae = copy.deepcopy(self._network(exact=True)[0]).cpu().to(memory_format=torch.contiguous_format)
        vae.register_to_config(_name_or_path="")  # diffusers would write the folder on this machine
        if self.shift_factor:
            for name, channels in (("quant_conv", 2 * self.channels), ("post_quant_conv", self.channels)):
                if getattr(vae, name) is None:
                    setattr(vae, name, _identity(channels))
                    vae.register_to_config(**{f"use_{name}": True})
            vae.quant_conv.bias[: self.channels] -= self.shift_factor
            vae.post_quant_conv.bias += self.shift_factor * vae.post_quant_conv.weight.sum((1, 2, 3))
            vae.register_to_config(shift_factor=None)
        return vae


def _identity(channels: int) -> nn.Conv2d:
    """A 1 x 1 convolution that returns what it is given."""
    convolution = nn.Conv2d(channels, channels, 1).requires_grad_(False)
    nn.init.dirac_(convolution.weight)
    nn.init.zeros_(convolution.bias)
    return convolution
