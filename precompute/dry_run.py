"""What an encode job would do, without loading a network."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from precompute.config import EncodeConfig
from precompute.work import EncodedSet, Rank
from recipes.config.build import build
from recipes.config.recipe import to_yaml
from recipes.config.schema import Component

# Stable Diffusion 2: (channels, pixels per latent pixel) and (tokens, width).
USUAL_VAE = (4, 8)
USUAL_TEXT = (77, 1024)
DVAE_DOWNSAMPLE = 8
CAPTION = 60  # bytes of a usual caption and key


def report(config: EncodeConfig, missing: list[str], rank: Rank) -> str:
    """The resolved config, shards to do, and expected sizes, as text."""
    lines = [to_yaml(config), *(f"missing: {path}" for path in missing)]
    for label, component in config.sources.items():
        try:
            encoded = EncodedSet(f"{config.out}/{label}", build(component).shards())
        except (FileNotFoundError, ValueError) as error:
            lines.append(f"{label}: the source cannot be read yet: {error}")
            continue
        todo = len(encoded.remaining())
        lines.append(
            f"{label}: {len(encoded.shards):,} input shards, {len(encoded.shards) - todo:,} done, {todo:,} to do, "
            f"about {-(-todo // rank.world):,} for each of {rank.world} ranks; into {encoded.out}"
        )
    if config.kind == "tokens":
        parts = {f"tokens {r}": 2 * config.crops * (r // DVAE_DOWNSAMPLE) ** 2 for r in config.resolutions}
    else:
        (channels, downsample), vae_known = image_shape(config.image_encoder)
        (length, width), text_known = text_shape(config.text_encoder)
        parts = {f"latents {r}": 2 * 2 * channels * (r // downsample) ** 2 for r in config.resolutions}
        parts["text"] = 2 * length * width
        for name, known in (("image encoder", vae_known), ("text encoder", text_known)):
            if not known:
                lines.append(f"sizes of the {name} are assumed to be Stable Diffusion 2's: no local config tells them")
    parts["the rest"] = 100 + CAPTION + 16 * config.crops * len(config.resolutions)
    total = sum(parts.values())
    lines.append(
        f"expected size: {total:,} bytes a picture ({', '.join(f'{name} {size:,}' for name, size in parts.items())}), "
        f"{total / 1e3:,.1f} GB for a million pictures, before compression"
    )
    return "\n".join(lines)


def image_shape(encoder: Component) -> tuple[tuple[int, int], bool]:
    """(channels, downsample) of a VAE, and whether its config says so."""
    folder = Path(str(encoder.args.get("path", ""))).expanduser() / (encoder.args.get("subfolder") or "")
    config = _read(folder / "config.json")
    if "latent_channels" not in config or "block_out_channels" not in config:
        return USUAL_VAE, False
    return (config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1)), True


def text_shape(encoder: Component) -> tuple[tuple[int, int], bool]:
    """(tokens, width) of a text encoder, and whether its config says so."""
    args = encoder.args
    root = Path(str(args.get("path") or args.get("model", "")).removeprefix("local-dir:")).expanduser()
    config = _read(root / (args.get("subfolder") or "") / "config.json")
    if "max_position_embeddings" in config and "hidden_size" in config:
        return (config["max_position_embeddings"], config["hidden_size"]), True
    text = _read(root / "open_clip_config.json").get("model_cfg", _open_clip(args.get("model", ""))).get("text_cfg", {})
    if "width" not in text:
        return USUAL_TEXT, False
    return (text.get("context_length", 77), text["width"]), True


def _open_clip(model: str) -> dict[str, Any]:
    """open_clip's own config of a model, read without importing it (it imports torch)."""
    package = importlib.util.find_spec("open_clip")
    if package is None or not model or "/" in model:
        return {}
    return _read(Path(package.submodule_search_locations[0]) / "model_configs" / f"{model}.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
