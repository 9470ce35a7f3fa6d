"""The recipe of the training benchmarks, and the sizes of its network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.latent_sets import Encoders
from benchmarks.common.random_encoders import TEXTS, VAES, VISION, vae_flops
from data.tokenizers.clip_library import open_clip
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.encoders.text import Tower
from recipes.models.latent_diffusion.unet import UNet

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Size:
    """A network, and encoders whose FLOPs relative to the network are as in Stable Diffusion 2.

    Attributes:
        encoders: configurations of the image and the text encoder.
        model: `key=value` overrides that set the size of the network.
        resolutions: sides of the images in pixels.
        batch: samples per step, over all ranks.
    """

    encoders: Encoders
    model: list[str]
    resolutions: list[int]
    batch: int


SIZES = {
    "small": Size(
        Encoders(
            {"block_out_channels": (16, 32, 64, 64), "layers_per_block": 2, "norm_num_groups": 8},
            {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 24},
        ),
        [
            "model.denoiser.channels=[40,80,160,160]",
            "model.denoiser.heads=[1,2,4,4]",
            "model.denoiser.norm_groups=8",
            "model.denoiser.text_width=64",
        ],
        [128],
        16,
    ),
    "sd2": Size(Encoders(VAES["sd2"], TEXTS["sd2"]), [], [256], 64),
}


def recipe_with(
    changes: list[str],
    size: Size,
    folder: Path,
    resolution: int,
    batch: int,
    microbatch: int | None,
    callbacks: Sequence[str] = (),
    missing: list[str] | None = None,
) -> Recipe:
    """yamls/sd2_base.yaml at a size, without validation, checkpoints and loggers.

    Args:
        changes: `key=value` overrides, which take precedence over all others.
        size: size of the network.
        folder: written by `benchmarks.common.latent_sets.write_set`.
        resolution: side of the images in pixels.
        batch: samples per step, over all ranks.
        microbatch: samples per microbatch and device; None: the whole batch of the device.
        callbacks: labels of the YAML's callbacks that are kept.
        missing: as in `recipes.config.recipe.load_config`.
    """
    recipe = load_config(
        ROOT / "yamls" / "sd2_base.yaml",
        [
            *size.model,
            f"output={folder}/run",
            f"data.streams.train.path={folder}/latents/train",
            f"data.resolution={resolution}",
            "data.workers=1",
            "evals.val=null",
            "schedule.warmup=1ba",  # otherwise weights and losses would hardly change
            "training.duration=1400000ba",
            f"training.global_batch={batch}",
            f"training.microbatch={'null' if microbatch is None else microbatch}",
            "training.precision=auto",
            "training.fsdp=null",  # measured as a lever
            "training.eval_every=null",
            "checkpoints={save: false, every: null, autoresume: false}",
            *changes,
            f"data.workers={8 if torch.cuda.is_available() else 1}",
        ],
        Recipe,
        missing,
    )
    recipe.callbacks = {name: recipe.callbacks[name] for name in callbacks}
    recipe.loggers = {}
    return recipe


def flops(size: Size, recipe: Recipe, resolution: int) -> dict[str, float]:
    """GFLOP per sample by PyTorch's counter: training of the U-Net, VAE, and text encoder."""
    network: UNet = build_on_meta(recipe.model).denoiser
    text, vae = size.encoders.text, size.encoders.vae
    side = resolution // 2 ** (len(vae["block_out_channels"]) - 1)
    with torch.device("meta"), torch.no_grad():
        tower = Tower(open_clip.CLIP(embed_dim=64, vision_cfg=VISION, text_cfg=text), "text")
        tower.blocks = tower.blocks[:-1]
        with FlopCounterMode(display=False) as counter:
            tower(torch.zeros(1, 77, dtype=torch.long))
    return {
        "training of the U-Net": 3 * unet_flops(network, side) / 1e9,
        "VAE": vae_flops(vae, resolution) / 1e9,
        "text encoder": counter.get_total_flops() / 1e9,
    }


@torch.no_grad()
def unet_flops(network: UNet, side: int) -> float:
    """FLOPs of the forward pass of one sample, with a caption of 77 tokens.

    Args:
        network: on the meta device.
        side: of the latents.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        latents = torch.empty(1, network.latent_channels, side, side)
        network(latents, torch.zeros(1, dtype=torch.long), torch.empty(1, 77, network.text_width))
    return counter.get_total_flops()
