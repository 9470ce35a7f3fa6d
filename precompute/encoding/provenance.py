"""What an encoded set was made from: the options that its values depend on, and the fields of its manifest."""

from __future__ import annotations

from importlib.metadata import version
from platform import python_version
from typing import Any

from data.encoded.manifest import NULL_TEXT
from precompute.config import EncodeConfig
from precompute.encoding.columns import LatentColumns, TokenColumns
from recipes.config.values import plain_values
from recipes.encoders.base import ImageEncoder, TextEncoder

NORMALISATION = {
    "latents": "mean = (posterior mean - shift_factor) * scaling_factor, std = posterior deviation * scaling_factor",
    "tokens": "none: tokens are the most likely codes of the encoder, in raster order",
}
CAPTION_POLICY = {
    "latents": "the caption without surrounding white space, embedded up to the text encoder's length; no caption is "
    f'dropped; the null caption is the empty text "", embedded in {NULL_TEXT}',
    "tokens": "the caption without surrounding white space, as text; encoded during training",
}
PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "mosaicml-streaming", "numpy", "pillow")


def encoding_options(config: EncodeConfig, images: ImageEncoder, texts: TextEncoder | None) -> dict[str, Any]:
    """Everything that the stored values depend on. All shards of a folder have the same options."""
    if images.kind == "tokens":
        own = images.facts()
    else:
        own = {
            "scaling_factor": images.scaling_factor,
            "shift_factor": images.shift_factor,
            "text_weights": texts.weights_hash,
            "text_precision": texts.precision,
            "text_layer": texts.layer,
            "tokenizer": texts.tokenizer_id,
            "text_length": texts.length,
        }
    return {
        **config.options(),
        "image_weights": images.weights_hash,
        "image_precision": images.precision,
        **own,
        "dtype": images.dtype,
    }


def manifest_fields(
    config: EncodeConfig, images: ImageEncoder, texts: TextEncoder | None, columns: LatentColumns | TokenColumns
) -> dict[str, Any]:
    """The fields of `data.encoded.manifest.Manifest` that are not counted from the shards."""
    image_encoder = {
        "component": plain_values(config.image_encoder),
        "id": images.id,
        "weights_hash": images.weights_hash,
        "precision": images.precision,
        **images.facts(),
    }
    text_encoder = None
    if texts is not None:
        text_encoder = {
            "component": plain_values(config.text_encoder),
            "id": texts.id,
            "weights_hash": texts.weights_hash,
            "precision": texts.precision,
            "layer": texts.layer,
            "tokenizer": texts.tokenizer_id,
            "length": texts.length,
            "width": texts.width,
        }
    return {
        "image_encoder": image_encoder,
        "text_encoder": text_encoder,
        "resolutions": list(config.resolutions),
        "crop": config.crop,
        "crops": config.crops,
        "upscale": config.upscale,
        "resampling": config.resampling,
        "seed": config.seed,
        "filter": plain_values(config.filter),
        "kind": images.kind,
        "dtype": images.dtype,
        "normalisation": NORMALISATION[images.kind],
        "caption_policy": CAPTION_POLICY[images.kind],
        "columns": columns.encodings(),
        "request": config.request(),
        "software": {"python": python_version(), **{name: version(name) for name in PACKAGES}},
    }
