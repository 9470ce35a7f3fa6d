"""Batches without values, in the shapes in which a recipe's data would give them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from data.cost import FLOAT
from data.encoded.manifest import NAME, Manifest
from data.encoded.text_manifest import NAME as TEXT_NAME
from data.encoded.text_manifest import TextManifest
from recipes.config.build import build
from recipes.config.recipe import Recipe
from recipes.config.values import Component
from recipes.models.task import Task

SIZES = {"downsample": 8, "text_length": 77}  # Stable Diffusion's, where neither recipe nor manifest says others


def traced_model(recipe: Recipe) -> Component:
    """The model of a recipe, with attention that is one operation: its masks change what it takes, not what it is."""
    if recipe.model.name != "autoregressive":
        return recipe.model
    return dataclasses.replace(recipe.model, args={**recipe.model.args, "attention": "masked"})


def blank_batch(recipe: Recipe, task: Task, samples: int) -> dict[str, Tensor]:
    """A batch on the meta device.

    Raises:
        ValueError: a model family whose batches are not known here, or a set of another kind.
    """
    needs, args = task.requirements(), recipe.data.args
    if recipe.model.name == "latent_diffusion" and "resolution" not in args:
        raise ValueError(f"data.name: plan.py knows the batches of latents, not those of {recipe.data.name}")
    sizes = encoded_sizes(recipe) if recipe.model.name == "latent_diffusion" else {}
    with torch.device("meta"):
        if recipe.model.name == "latent_diffusion":
            side = args["resolution"] // sizes["downsample"]
            return {
                "latents": torch.empty(samples, needs["channels"], side, side),
                "text": torch.empty(samples, sizes["text_length"], needs["text_width"]),
            }
        if recipe.model.name == "autoregressive":
            text = torch.empty(samples, needs["text_positions"], dtype=torch.long)
            image = torch.empty(samples, needs["side"] ** 2, dtype=torch.long)
            return {"text": text, "image": image, "text_tokens": torch.empty(samples)}
        if recipe.model.name == "language":
            return {"tokens": torch.empty(samples, needs["positions"] + 1, dtype=torch.long)}
    known = "latent_diffusion, autoregressive and language"
    raise ValueError(f"model.name: plan.py knows the batches of {known}, not those of {recipe.model.name}")


def encoded_sizes(recipe: Recipe) -> dict[str, int]:
    """Pixels per latent and tokens per caption: what the recipe expects, or has in a set that lies on this machine.

    Raises:
        ValueError: the set is not one of latents.
    """
    found = {}
    for encoded in build(recipe.data.args.get("streams") or {}).values():
        if not found and (Path(encoded.local) / NAME).is_file():
            manifest = Manifest.read(encoded.local)
            manifest.check(kind="latents")
            found = {"downsample": manifest.downsample, "text_length": manifest.text_shape[0]}
    return {**SIZES, **found, **(recipe.data.args.get("expect") or {})}


def batch_bytes(batch: dict[str, Tensor], samples: int, microbatch: int) -> int:
    """Bytes that a step's data takes on a device: all of its samples as they are stored, and those of a microbatch in
    32 bits, once as they are transformed and once as Composer copies them for the pass.

    Args:
        batch: of any number of samples.
        samples: of the step.
        microbatch: samples of a microbatch.
    """
    values = sum(tensor[0].numel() for tensor in batch.values())
    return sample_bytes(batch) * samples + 2 * FLOAT * values * microbatch


def stored_bytes(recipe: Recipe) -> float | None:
    """Bytes that one sample takes in the recipe's encoded sets, by their manifests; None: one is not on this machine.

    A sample has all that was encoded of its image, in other resolutions and crops too, and is fetched as a whole.
    """
    total = shares = 0.0
    for encoded in build(recipe.data.args.get("streams") or {}).values():
        folder, options = Path(encoded.local), encoded.options
        if (folder / NAME).is_file():
            found = Manifest.read(folder)
        elif (folder / TEXT_NAME).is_file():
            found = TextManifest.read(folder / TEXT_NAME)
        else:
            return None
        share = options.get("proportion") or found.samples * (options.get("repeat") or 1.0)
        total += share * found.bytes / max(1, found.samples)
        shares += share
    return total / shares if shares else None


def sample_bytes(batch: dict[str, Tensor]) -> int:
    """Bytes of one sample as it is read: 16 bits per value, and mean and deviation for latents."""
    values = {name: tensor[0].numel() for name, tensor in batch.items() if name != "text_tokens"}
    return 2 * sum(count * (2 if name == "latents" else 1) for name, count in values.items())
