"""The manifest of an encoded set: written beside its shards by `precompute/encode.py`, checked before training.

It needs the standard library only, so a recipe is checked against its data before anything slow is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.system.disk_errors import about
from data.system.files import write_text

NAME = "manifest.json"
NULL_TEXT = "null_text.npy"
REJECTED = "rejected.jsonl"
VERSION = 1

_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list, "dict": dict}
# What encoders must say of themselves.
_NUMBER = (int, float)
_IMAGES = {
    "latents": {"channels": int, "downsample": int, "scaling_factor": _NUMBER, "shift_factor": _NUMBER},
    "tokens": {"codes": int, "downsample": int},
}
_NORMALISATION = ("scaling_factor", "shift_factor")
# What sets that are trained on together have in common.
_ENCODERS = ("kind", "image_weights", *_NORMALISATION, "text_weights", "text_layer", "tokenizer")
_TEXTS = {"length": int, "width": int, "tokenizer": str}

# What to do when a recipe expects something else, by field of `Manifest.check`.
_ADVICE = {
    "resolution": "train at a resolution the set has, or encode again with this one in `resolutions`",
    "channels": "give the denoiser the set's number of latent channels, or encode again with the other VAE",
    "downsample": "encode again with the VAE that the recipe means",
    "scaling_factor": "the latents are normalised already: remove the factor from the recipe, or encode again",
    "shift_factor": "the latents are normalised already: remove the shift from the recipe, or encode again",
    "text_width": "set the denoiser's cross-attention width to the set's, or encode again with the other text encoder",
    "text_length": "train with the set's number of tokens, or encode again with the other text encoder",
    "text_layer": "encode again with the layer that the recipe means",
    "tokenizer": "encode again with the tokenizer that the recipe means",
    "image_weights": "encode again: these latents come from other VAE weights",
    "text_weights": "encode again: these embeddings come from other text encoder weights",
    "kind": "train on a set of this kind: `data: {name: latents}` reads latents, `data: {name: tokens}` tokens",
    "codes": "give the transformer the set's number of image codes, or encode again with the other dVAE",
    "grid_multiple": "give the denoiser a patch size, or levels, by which the side of the set's latents divides",
    "side": "train at a resolution whose grid fits the transformer's, or give the transformer the set's grid",
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an encoded set of images and captions holds, in JSON-compatible values."""

    image_encoder: dict[str, Any]
    """component (name and arguments that build it), id, weights_hash (sha256), precision, downsample; for latents also
    channels, scaling_factor and shift_factor; for tokens also codes."""
    text_encoder: dict[str, Any] | None
    """component, id, weights_hash (sha256), precision, layer, tokenizer, length (tokens), width; null for tokens,
    whose captions are encoded in training."""
    resolutions: list[int]
    """Sides of the encoded squares, in pixels."""
    crop: str
    """How the square crops were chosen (see `EncodeConfig.crop`). Random crops are stored per sample."""
    upscale: bool
    """Whether images smaller than a resolution were enlarged. If not, they were rejected as too_small."""
    seed: int
    """Seed of random crops."""
    filter: dict[str, Any]
    """Name and arguments of the filter that images and captions passed."""
    dtype: str
    """Dtype of latents and embeddings, or of tokens."""
    normalisation: str
    """How the posterior was normalised, exactly once; for tokens, what they are."""
    caption_policy: str
    """Which text was embedded, and what the null caption is."""
    columns: dict[str, str]
    """MDS columns and their encodings."""
    samples: int
    """Number of images."""
    rejected: dict[str, int]
    """Number of rejected samples, by reason."""
    reencoded: int
    """Number of samples that were encoded again in fp32, because the first result was not finite."""
    upscaled: dict[str, int]
    """Per resolution, the number of images that were enlarged (whose crop box is smaller than the resolution)."""
    shards: int
    """Number of input shards, each of which has its own folder."""
    bytes: int
    """Size of the MDS files on disk."""
    latents: dict[str, dict[str, list[float]]]
    """Statistics of the normalised latents per resolution and channel: mean and std of the posterior means, and
    sample_std, the standard deviation of samples from the posterior. Empty for tokens."""
    request: dict[str, Any]
    """The part of the encode config that determines the set, and digests of the local files that it names."""
    software: dict[str, str]
    """Versions of the packages that encoded the set."""
    kind: str = "latents"
    """What images were encoded to: latents or tokens."""
    crops: int = 1
    """Number of crops that were encoded per image."""
    resampling: str | None = None
    """How squares were resized; null for DALL-E's crops, and in sets of earlier versions (Lanczos)."""
    version: int = VERSION
    """Version of this format."""
    where: str = dataclasses.field(default=NAME, compare=False)
    """Where the manifest was read from, for error messages; not written."""

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Reads the manifest of an encoded set.

        Raises:
            FileNotFoundError: the folder has no manifest.
            ValueError: the file is no manifest of this version.
        """
        path = Path(folder) / NAME
        try:
            with about(path):
                text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"no file {path}: not an encoded set, or not finished; run `python precompute/encode.py` until it is"
            ) from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not UTF-8 text; encode the set again") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str = NAME) -> Manifest:
        """Parses the JSON text of a manifest. `where` names its source in error messages.

        Raises:
            ValueError: as `read`.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}); encode the set again") from None
        if not isinstance(values, dict) or values.get("version") != VERSION:
            found = values.get("version") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"{where}: version is {found!r}, this code reads {VERSION}; encode the set again")
        own = [f for f in dataclasses.fields(cls) if f.name != "where"]
        fields = {f.name: str(f.type) for f in own}
        newer = {f.name: f.default for f in own if f.default is not dataclasses.MISSING}  # older sets lack them
        values = {**newer, **values}
        for name in sorted(fields.keys() ^ values.keys()):
            state = "missing" if name in fields else "unknown"
            raise ValueError(f"{where}: {state} field `{name}`; encode the set again with this version of the code")
        for name, kind in fields.items():
            allowed = values[name] is None and kind.endswith("| None")
            if not allowed and not isinstance(values[name], _TYPES[kind.removesuffix(" | None").partition("[")[0]]):
                raise ValueError(f"{where}: {name} is {values[name]!r}, expected {kind}")
        _check_encoder(where, "image_encoder", values["image_encoder"], _IMAGES.get(values["kind"], {}))
        if values["text_encoder"] is not None:
            _check_encoder(where, "text_encoder", values["text_encoder"], _TEXTS)
        if not all(type(size) is int and size > 0 for size in values["resolutions"]):
            raise ValueError(f"{where}: resolutions is {values['resolutions']!r:.80}, expected sides in pixels")
        return cls(**values, where=where)

    def write(self, folder: str | Path) -> None:
        """Writes FOLDER/manifest.json, atomically."""
        values = dataclasses.asdict(self)
        del values["where"]
        write_text(Path(folder) / NAME, json.dumps(values, indent=1, ensure_ascii=False) + "\n")

    @property
    def channels(self) -> int:
        """Number of channels of a latent."""
        return self.image_encoder["channels"]

    @property
    def downsample(self) -> int:
        """Factor between the side of an image in pixels and the side of its grid of latent pixels or tokens."""
        return self.image_encoder["downsample"]

    @property
    def text_shape(self) -> tuple[int, int]:
        """(tokens, width) of a text embedding."""
        return self.text_encoder["length"], self.text_encoder["width"]

    def latent_shape(self, resolution: int) -> tuple[int, int, int]:
        """(channels, height, width) of a latent at a resolution in pixels."""
        return self.channels, self.side(resolution), self.side(resolution)

    def side(self, resolution: int) -> int:
        """Side of the grid of latent pixels or tokens at a resolution in pixels."""
        return resolution // self.downsample

    def encoders(self) -> dict[str, Any]:
        """What sets that are trained on together have in common, as arguments of `check`."""
        found = self._found(None)
        return {name: found[name] for name in _ENCODERS if name in found}

    def other_arguments(self, first: Manifest) -> list[str]:
        """Arguments of encoders that differ between two sets, and that `encoders` may not tell apart, such as a factor
        by which an encoder of one's own multiplies embeddings. Those of this repository have none of them, which have
        no dot in their name. Places may differ, and so may precisions."""
        found = []
        for group in ("image_encoder", "text_encoder"):
            own, others = ((getattr(manifest, group) or {"component": {}})["component"] for manifest in (self, first))
            if "." not in str(own.get("name")) or own["name"] != others.get("name"):
                continue
            for key in sorted({*own, *others} - {"path", "precision"}):
                if own.get(key) != others.get(key):
                    values = (repr(one[key])[:60] if key in one else "not given" for one in (own, others))
                    found.append(f"{group}.{key} is {' and '.join(values)}")
        return found

    def check(self, **expected: Any) -> None:
        """Compares the set with what a recipe expects.

        Args:
            expected: any of kind, resolution, downsample, image_weights (sha256), dtype, crop, crops, upscale; for
                latents also channels, scaling_factor, shift_factor, text_weights (sha256), text_layer, text_width,
                text_length and tokenizer; for tokens also codes; with a resolution the side of the grid, and
                grid_multiple, of which it must be a multiple. None is not checked.

        Raises:
            ValueError: a field differs. The message names it, the set's value, the expected one, and what to do.
        """
        found = self._found(expected.get("resolution"))
        for name, value in expected.items():
            if name not in found:
                close = difflib.get_close_matches(name, found, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it knows {', '.join(found)}"
                raise ValueError(f"Manifest.check of {self.kind} knows no field {name}: {hint}")
            if value is None or _fits(name, value, found[name]):
                continue
            advice = _ADVICE.get(name, f"change the recipe's {name}, or encode the set again")
            wanted = f"a multiple of {value}" if name == "grid_multiple" else value
            raise ValueError(f"{self.where}: {name} is {found[name]}, the recipe expects {wanted}; {advice}")

    def _found(self, resolution: int | None) -> dict[str, Any]:
        """The values that `check` compares, by name."""
        images, texts = self.image_encoder, self.text_encoder or {}
        names = ("channels", "downsample", *_NORMALISATION, "codes")
        found = {name: images[name] for name in names if name in images}
        found["image_weights"] = images["weights_hash"]
        if texts:
            found |= {"text_weights": texts["weights_hash"], "text_layer": texts.get("layer")}
            found |= {f"text_{name}": texts[name] for name in ("width", "length")}
            found["tokenizer"] = texts["tokenizer"]
        if resolution is not None:
            found["side"] = found["grid_multiple"] = self.side(resolution)
        found |= {name: getattr(self, name) for name in ("kind", "dtype", "crop", "crops", "upscale")}
        return {**found, "resolution": self.resolutions}


def _fits(name: str, value: Any, found: Any) -> bool:
    if name == "resolution":
        return value in found
    if not (isinstance(value, _NUMBER) and isinstance(found, _NUMBER)):
        return value == found
    if name == "grid_multiple":
        return value != 0 and found % value == 0
    return math.isclose(value, found, rel_tol=1e-6)


def _check_encoder(where: str, name: str, values: dict[str, Any], fields: dict[str, Any]) -> None:
    for field, kind in {"component": dict, "weights_hash": str, **fields}.items():
        value = values.get(field)
        sized = kind is not int or (isinstance(value, int) and value > 0)
        if not isinstance(value, kind) or not sized:
            raise ValueError(f"{where}: {name}.{field} is {value!r:.80}; encode the set again with this code")
