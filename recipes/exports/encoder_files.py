"""The files of local encoders that an export has copies of, so that it can be moved to another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.encoded.manifest import Manifest
from data.system.log import log
from data.tokenizers.tokenizer_files import TOKENIZER_FILES
from recipes.encoders import open_clip_models, text, vae

ENCODERS = ("image_encoder", "text_encoder")  # in a manifest, and the folders of their copies in an export
# Files of weights by their suffixes, and which of them an encoder reads; others read any.
SUFFIXES = (".bin", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors")
READ = {"kl_vae": vae.WEIGHTS, "hf_clip_text": text.WEIGHTS, "open_clip_text": open_clip_models.WEIGHTS}


def encoder_files(manifest: Manifest, bundle: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """The files of local encoders that an export has copies of, so that it can be moved, and where in it these are.

    Encoders of a hub are found by their id. The manifest of a set of somebody else may name any folder: one without
    weights, such as a folder of credentials, must not get into an export, which is passed on.

    Args:
        manifest: of the encoded set.
        bundle: folder whose copies are taken instead, as far as it has them.
    """
    for name in ENCODERS:
        if bundle is not None and (bundle / name).is_dir():
            copies = (file for file in (bundle / name).rglob("*") if file.is_file())
            yield from ((file, file.relative_to(bundle)) for file in copies)
            continue
        component = (getattr(manifest, name) or {"component": {}})["component"]
        _, _, of_model = (component.get("model") or "").partition(open_clip_models.LOCAL_PREFIX)
        folder = component.get("path") or of_model
        path, weights = Path(folder).expanduser(), Path(component.get("pretrained") or "").expanduser()
        if folder and path.is_dir():
            parts = _parts_of(component)
            if not any(_has_weights(path / part) for part in parts):
                log.warning(f"export: {path}, which the data's manifest names as {name}, holds no weights; not copied")
                continue
            found = {file.relative_to(path): file for part in parts for file in (path / part).rglob("*")}
            for inside, file in found.items():
                if file.is_file() and _is_read(inside, component.get("name")):
                    yield file, Path(name, inside)
            words = component.get("tokenizer") or ""
            for file in TOKENIZER_FILES if text.lies_outside(words) else ():  # no others of a folder without weights
                if (path / words / file).is_file():
                    yield path / words / file, Path(name, text.SEPARATE, file)
        elif weights.is_file() and weights.suffix in SUFFIXES:
            yield weights, Path(name, weights.name)
        elif path.is_absolute() or len(path.parts) > 2 or weights.suffix in SUFFIXES:  # no id of a hub
            log.warning(
                f"export: {folder or weights}, which the data's manifest names as {name}, is not there (looked in "
                f"{Path.cwd()}); the export has no copy of it, and images cannot be generated without it"
            )


def _is_read(file: Path, encoder: str | None) -> bool:
    """Whether an encoder may read a file of its folder. A repository of the hub has the same weights up to four times,
    some as pickles, and a checkout of it has them again in .git."""
    hidden = any(part.startswith(".") for part in file.parts)
    return not hidden and (file.suffix not in SUFFIXES or file.name == READ.get(encoder, file.name))


def _has_weights(folder: Path) -> bool:
    """Whether a folder, or a folder in it, holds a file of weights."""
    return any(file.suffix in SUFFIXES for pattern in ("*", "*/*") for file in folder.glob(pattern))


def _parts_of(component: dict[str, Any]) -> set[str]:
    """The folders that an encoder reads in its local folder, such as vae in a whole pipeline; "": all of it but what
    links to other folders. A tokenizer may lie outside of it."""
    model, words = component.get("subfolder") or "", component.get("tokenizer")
    parts = {model, model if words is None or text.lies_outside(words) else words}
    return {""} if any(map(text.lies_outside, parts)) else parts
