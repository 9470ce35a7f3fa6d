"""An exported diffusion run as a pipeline of diffusers, which draws the same pictures without this repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from recipes.models.family import ExportParts
from recipes.models.latent_diffusion.pipeline import load

# Largest difference of text embeddings that the conversion may make: rounding of another order of additions.
TOLERANCE = 1e-3
PROBES = ["", "A photo of a cat, it's 2 o'clock!", "one two three " * 60]


def save(parts: ExportParts, folder: Path) -> None:
    """Write a folder that `StableDiffusionPipeline.from_pretrained` opens.

    Args:
        parts: of the export, on the CPU in fp32.
        folder: which exists and is empty.

    Raises:
        NotInDiffusersError: a denoiser or an objective that diffusers does not have.
        ValueError: an encoder that it does not have.
    """
    pipeline = load(parts)
    unet, scheduler = pipeline.denoiser.for_diffusers(), pipeline.objective.for_diffusers()
    text_encoder, tokenizer = pipeline.text_encoder.for_transformers()
    check_text(pipeline.text_encoder, text_encoder, tokenizer)
    unet.register_to_config(sample_size=pipeline.resolution // parts.manifest.downsample)  # the default size
    StableDiffusionPipeline(
        vae=pipeline.image_encoder.for_diffusers(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(str(folder), safe_serialization=True)


@torch.no_grad()
def check_text(encoder: Any, model: Any, tokenizer: Any) -> None:
    """Compare a converted text encoder with the one that it was made of, on a few captions.

    Raises:
        ValueError: they differ.
    """
    tokens = torch.tensor(
        tokenizer(PROBES, padding="max_length", max_length=encoder.length, truncation=True)["input_ids"]
    )
    if not torch.equal(tokens, encoder.tokenize(PROBES)):
        raise ValueError(f"text_encoder: {encoder.id}: transformers' tokenizer gives other tokens; use --layout native")
    difference = (model(tokens).last_hidden_state - encoder.encode_tokens(tokens, exact=True)).abs().max().item()
    if not difference <= TOLERANCE:
        raise ValueError(
            f"text_encoder: {encoder.id} as transformers' module differs by {difference:.2g}; use --layout native"
        )
