"""Latent diffusion in recipes/generate.py."""

from recipes.models.family import Family

FAMILY = Family(
    title="diffusion",
    networks=("unet",),
    guidance=3.0,
    options={
        "--sampler": {"help": "one of the objective's samplers, such as dpm++ or ddim (default: its own)"},
        "--steps": {"type": int, "help": "network evaluations per image (default: 25)"},
        "--resolution": {"type": int, "help": "side of the images in pixels (default: that of training)"},
    },
    pipeline="recipes.models.latent_diffusion.pipeline:load",
    diffusers="recipes.models.latent_diffusion.diffusers_pipeline:save",
)
