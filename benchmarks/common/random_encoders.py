"""Encoders with random weights: their published sizes and small ones, files that the encode job reads, and FLOPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_model
from torch.utils.flop_counter import FlopCounterMode

from data.tokenizers.clip_library import open_clip

# The published configurations. The image tower of the text encoder is not used, and as small as possible.
VAES = {
    "sd2": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32},
    "small": {"block_out_channels": (16, 32, 32, 32), "layers_per_block": 1, "norm_num_groups": 8},
}
TEXTS = {
    "sd2": {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24},
    "small": {"context_length": 77, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 4},
}
VISION = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 32}


def new_vae(config: dict[str, Any]) -> AutoencoderKL:
    """An autoencoder of Stable Diffusion's kind, of one of the sizes of `VAES`."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        scaling_factor=0.18215,
        **config,
    )


def write_encoders(vae: dict[str, Any], text: dict[str, Any], folder: Path) -> None:
    """Write networks with random weights to FOLDER/vae and FOLDER/text, in the formats that the encode job reads."""
    torch.manual_seed(0)
    new_vae(vae).save_pretrained(str(folder / "vae"), safe_serialization=True)
    config = {"embed_dim": 64, "vision_cfg": VISION, "text_cfg": text}
    (folder / "text").mkdir()
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "text" / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
    )
    save_model(open_clip.CLIP(**config), str(folder / "text" / "open_clip_model.safetensors"))


def vae_flops(config: dict[str, Any], side: int) -> float:
    """FLOPs of encoding one image.

    Args:
        config: one of `VAES`.
        side: of the image in pixels.
    """
    with torch.device("meta"), torch.no_grad():
        encoder = new_vae(config)
        with FlopCounterMode(display=False) as counter:
            encoder.encode(torch.empty(1, 3, side, side))
    return counter.get_total_flops()
