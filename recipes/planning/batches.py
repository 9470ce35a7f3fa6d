"""Batches without values, in the shapes in which a recipe's data would give them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from recipes.config.recipe import Recipe
from recipes.config.values import Component
from recipes.models.task import Task

DOWNSAMPLE = 8  # pixels per latent, where no manifest is at hand
TEXT_LENGTH = 77


def traced_model(recipe: Recipe) -> Component:
    """The model of a recipe, with attention that is one operation: its masks change what it takes, not what it is."""
    if recipe.model.name != "autoregressive":
        return recipe.model
    return dataclasses.replace(recipe.model, args={**recipe.model.args, "attention": "masked"})


def blank_batch(recipe: Recipe, task: Task, samples: int) -> dict[str, Tensor]:
    """A batch on the meta device.

    Raises:
        ValueError: a model family whose batches are not known here.
    """
    needs, args = task.requirements(), recipe.data.args
    with torch.device("meta"):
        if recipe.model.name == "latent_diffusion":
            side = args["resolution"] // DOWNSAMPLE
            length = (args.get("expect") or {}).get("text_length", TEXT_LENGTH)
            return {
                "latents": torch.empty(samples, needs["channels"], side, side),
                "text": torch.empty(samples, length, needs["text_width"]),
            }
        if recipe.model.name == "autoregressive":
            text = torch.empty(samples, needs["text_positions"], dtype=torch.long)
            image = torch.empty(samples, needs["side"] ** 2, dtype=torch.long)
            return {"text": text, "image": image, "text_tokens": torch.empty(samples)}
        if recipe.model.name == "language":
            return {"tokens": torch.empty(samples, needs["positions"] + 1, dtype=torch.long)}
    known = "latent_diffusion, autoregressive and language"
    raise ValueError(f"model.name: plan.py knows the batches of {known}, not those of {recipe.model.name}")


def sample_bytes(batch: dict[str, Tensor]) -> int:
    """Bytes of one sample as it is stored: 16 bits per value, and mean and deviation for latents."""
    values = {name: tensor[0].numel() for name, tensor in batch.items() if name != "text_tokens"}
    return 2 * sum(count * (2 if name == "latents" else 1) for name, count in values.items())
