"""What a job would do, without loading a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from data.sources.base import shards_of
from data.system.errors import one_line, together
from data.system.files import read_if_object, read_object
from data.system.ranks import Rank
from precompute.config import EncodeConfig, VocabularyConfig, source_options
from precompute.encoding.columns import REST, LatentColumns, TokenColumns, check_resolutions
from precompute.output.output_set import OutputSet, output_of
from precompute.texts.pack_config import PackConfig
from recipes.config.build import build
from recipes.config.recipe import to_yaml
from recipes.config.schema import Component

# Of Stable Diffusion 2: (channels, pixels per latent pixel) and (tokens, width).
USUAL_VAE = (4, 8)
USUAL_TEXT = (77, 1024)
DVAE_DOWNSAMPLE = 8
TEXT_BYTES = 60  # a usual caption with its key
ROW_KEY_BYTES = 20  # the key of a row of packed texts: the name of its shard and its number there
MDS_NUMBER = 4  # bytes of the MDS format per sample for its offset, and for the size of each column that may vary


def encode_report(config: EncodeConfig, missing: list[str], rank: Rank) -> str:
    """The resolved config, the shards to do and the expected sizes of an encode job, as text.

    Raises:
        ValueError: the filter's bounds contradict each other, a source lacks what the config names, a resolution does
            not fit the image encoder, or `out` holds values made with other options, as far as these are known without
            the encoders.
    """
    build(config.filter)  # for its errors

    def is_complete(label: str, output: OutputSet) -> bool:
        return output.is_complete(config.request() | source_options(config.sources[label]), output.shards)

    shards_line = _shards_line(partial(output_of, config), partial(_options, config), rank, is_complete)
    return "\n".join([*_config_lines(config, missing), *_source_lines(config, shards_line), *_size_lines(config)])


def pack_report(config: PackConfig, missing: list[str], rank: Rank) -> str:
    """The resolved config, the shards to do and the size of a row of a packing job, as text.

    Raises:
        ValueError: the filter's bounds contradict each other, the vocabulary is none, a source lacks what the config
            names, or `out` holds rows made with other options.
    """
    build(config.filter)  # for its errors
    if Path(config.vocabulary).is_file():
        config.read_vocabulary()  # for its errors

    def output_of(label: str, shards: list[str]) -> OutputSet:
        return OutputSet(f"{config.out}/{label}", shards)

    lines = _source_lines(config, _shards_line(output_of, partial(_options, config), rank))
    size = 2 * (config.positions + 1) + ROW_KEY_BYTES + 2 * MDS_NUMBER
    lines.append(f"expected size: {size:,} bytes per row of {config.positions} + 1 tokens, before compression")
    return "\n".join([*_config_lines(config, missing), *lines])


def vocabulary_report(config: VocabularyConfig, missing: list[str]) -> str:
    """The resolved config and the shards to read of a vocabulary job, as text.

    Raises:
        ValueError: the filter's bounds contradict each other, a source lacks what the config names, or another job
            wrote the file.
    """
    from precompute.texts.vocabulary_job import is_written  # not above: other jobs do not need what it imports

    build(config.filter)  # for its errors
    sources = _source_lines(config, lambda label, shards: f"{label}: {len(shards):,} input shards")
    into = f"into {config.out}: {config.entries:,} entries{', already complete' if is_written(config) else ''}"
    return "\n".join([*_config_lines(config, missing), *sources, into])


def _options(config: EncodeConfig | PackConfig, label: str) -> dict[str, Any]:
    """The options that the values of a set depend on, as far as they are known yet."""
    if isinstance(config, EncodeConfig):
        own = config.options()
    else:
        own = config.request() if Path(config.vocabulary).is_file() else {}
    return own | source_options(config.sources[label])


def _shards_line(
    output_of: Callable[[str, list[str]], OutputSet],
    options_of: Callable[[str], dict[str, Any]],
    rank: Rank,
    is_complete: Callable[[str, OutputSet], bool] = lambda label, output: False,
) -> Callable[[str, list[str]], str]:
    """A function that says of a source's shards how many are done, for `_source_lines`. The options of a complete set
    are not compared: the job does not go on with it."""

    def describe(label: str, shards: list[str]) -> str:
        output = output_of(label, shards)
        todo = len(output.remaining())
        if todo or not is_complete(label, output):
            output.check(options_of(label))
        return (
            f"{label}: {len(shards):,} input shards, {len(shards) - todo:,} done, {todo:,} to do, "
            f"about {-(-todo // rank.world):,} for each of {rank.world} ranks; into {output.out}"
            + ("" if output.copy is None else f" and {output.copy.address}")
        )

    return describe


def _config_lines(config: EncodeConfig | PackConfig | VocabularyConfig, missing: list[str]) -> list[str]:
    return [to_yaml(config), *(f"missing: {path}" for path in missing)]


def _source_lines(
    config: EncodeConfig | PackConfig | VocabularyConfig, describe: Callable[[str, list[str]], str]
) -> list[str]:
    """One line per source: `describe(label, shards)`, or what is not there yet, such as its files or its scores.

    Raises:
        ValueError: a source cannot be read as the config says, or from `describe`.
    """
    lines = []

    def add(label: str, component: Component) -> None:
        try:
            shards = shards_of(build(component))
            source_options(component)  # for its errors
        except FileNotFoundError as error:
            lines.append(f"{label}: the source cannot be read yet: {error}")
        else:
            lines.append(describe(label, shards))

    together(partial(add, *source) for source in config.sources.items())
    return lines


def _size_lines(config: EncodeConfig) -> list[str]:
    lines = []
    encoder = config.image_encoder
    if config.kind == "tokens":
        if encoder.name == "dvae":
            check_resolutions(config.resolutions, DVAE_DOWNSAMPLE, encoder.args["path"])
        else:
            lines.append(f"sizes of the image encoder are assumed to be DALL-E's: {encoder.name} is not loaded")
        columns = TokenColumns({r: (r // DVAE_DOWNSAMPLE) ** 2 for r in config.resolutions}, config.crops)
    else:
        (channels, downsample), vae_known = image_shape(encoder)
        if vae_known:
            check_resolutions(config.resolutions, downsample, encoder.args["path"])
        text, text_known = text_shape(config.text_encoder)
        sides = {r: r // downsample for r in config.resolutions}
        columns = LatentColumns({r: (channels, side, side) for r, side in sides.items()}, text)
        for name, known in (("image encoder", vae_known), ("text encoder", text_known)):
            if not known:
                lines.append(f"sizes of the {name} are assumed to be Stable Diffusion 2's: there is no local config")
    parts = columns.bytes_by_part()
    parts[REST] += TEXT_BYTES + 3 * MDS_NUMBER  # key and caption vary
    total = sum(parts.values())
    lines.append(
        f"expected size: {total:,} bytes per image ({', '.join(f'{name} {size:,}' for name, size in parts.items())}), "
        f"{total / 1e3:,.1f} GB for a million images, before compression"
    )
    return lines


def image_shape(encoder: Component) -> tuple[tuple[int, int], bool]:
    """(channels, downsampling factor) of a VAE, and whether they were read from its config.

    Raises:
        ValueError: the config is damaged.
    """
    file = Path(str(encoder.args.get("path", ""))).expanduser() / (encoder.args.get("subfolder") or "") / "config.json"
    with _damage_named(file):
        config = _read(file)
        if "latent_channels" not in config or "block_out_channels" not in config:
            return USUAL_VAE, False
        if not isinstance(blocks := config["block_out_channels"], list) or not blocks:
            raise ValueError(f"block_out_channels is {blocks!r:.40}, expected the widths of the blocks")
        return (_size(config, "latent_channels"), 2 ** (len(blocks) - 1)), True


def text_shape(encoder: Component) -> tuple[tuple[int, int], bool]:
    """(tokens, width) of a text encoder, and whether they were read from its config.

    Raises:
        ValueError: the config is damaged.
    """
    args = encoder.args
    root = Path(str(args.get("path") or args.get("model", "")).removeprefix("local-dir:")).expanduser()
    file = root / (args.get("subfolder") or "") / "config.json"
    with _damage_named(file):
        config = _read(file)
        config = config.get("text_config") or config  # of a whole CLIP model
        if "max_position_embeddings" in config and "hidden_size" in config:
            return (_size(config, "max_position_embeddings"), _size(config, "hidden_size")), True
    file = root / "open_clip_config.json"
    with _damage_named(file):
        model = _read(file).get("model_cfg") or _open_clip(args.get("model", ""))
        text = model.get("text_cfg", {})
        if "width" not in text:
            return USUAL_TEXT, False
        return (_size({"context_length": 77, **text}, "context_length"), _size(text, "width")), True


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _size(config: dict[str, Any], name: str) -> int:
    if type(config[name]) is not int or config[name] < 1:
        raise ValueError(f"{name} is {config[name]!r:.40}, expected a whole number above 0")
    return config[name]


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """A context in which the config of an encoder is read: it was written by other programs, or by hand."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:  # also of lists in the place of objects
        raise ValueError(f"{file}: not the config of an encoder ({one_line(error)}); copy the file again") from None


def _open_clip(model: str) -> dict[str, Any]:
    """open_clip's config of a model, read without importing open_clip, which imports torch."""
    if not model or "/" in model:
        return {}
    package = importlib.util.find_spec("open_clip")
    return read_if_object(Path(package.submodule_search_locations[0]) / "model_configs" / f"{model}.json")
