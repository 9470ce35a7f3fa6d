"""Models and tokenizers of open_clip: by the names that it knows, or from folders in its format, which nobody should
trust."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from data.tokenizers.clip_words import bound
from data.tokenizers.tokenizer_files import OPTION_FILES, TOKENIZER_FILES
from recipes.encoders.loading import cannot_load
from recipes.models.config_files import build_from
from recipes.models.json_files import is_number, object_in, read_object
from recipes.models.torch_files import checked
from recipes.models.weights import read_safetensors

LOCAL_PREFIX = "local-dir:"
CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
# Options of a folder's tokenizer. Of the others, trust_remote_code runs Python files of the folder, bpe_path reads any
# file, and additional_special_tokens becomes part of a regular expression.
TOKENIZER_OPTIONS = ("clean", "language", "reduction_mask", "strip_sep_token")


def words_of(folder: Path) -> list[Path]:
    """The files of a folder's own tokenizer; none where open_clip's is used."""
    if not read_object(folder / CONFIG)["model_cfg"]["text_cfg"].get("hf_tokenizer_name"):
        return []
    return [file for name in TOKENIZER_FILES if (file := folder / name).is_file()]


def load_open_clip(model: str, pretrained: str | None, key: str) -> nn.Module:
    """A model of open_clip with its weights, on the CPU.

    Args:
        model: local-dir:FOLDER, or a model name of open_clip.
        pretrained: a tag of the weights or a local .safetensors file; None for a folder.
        key: key of the config, for messages.

    Raises:
        FileNotFoundError: a local folder or file is missing.
        ValueError: an unknown model or tag, or one that cannot be loaded.
    """
    from data.tokenizers.clip_library import open_clip

    check_names(model, pretrained, key)

    def create(config: dict[str, Any] | None = None) -> nn.Module:
        # No separate weights of the towers: a config must not make open_clip download other models.
        with checked():  # the weights of some tags are files of torch.save
            return open_clip.create_model(
                model, pretrained, device="cpu", pretrained_text=False, pretrained_image=False
            )

    try:
        if model.startswith(LOCAL_PREFIX):
            folder = Path(model.removeprefix(LOCAL_PREFIX))
            _check_config(folder / CONFIG)
            return build_from(folder / CONFIG, create, read_safetensors(folder / WEIGHTS))
        return create()
    # No network, a file that is not whole, or weights whose shapes are not those of the config.
    except (OSError, RuntimeError, SafetensorError) as error:
        raise cannot_load(key, model if pretrained is None else f"{model}/{pretrained}", error) from error


def open_clip_tokenizer(model: str) -> Any:
    """The tokenizer of a model that `check_names` or `load_open_clip` has taken.

    Raises:
        ValueError: the config in its folder names one that cannot be opened, or that would run code of the folder.
    """
    from data.tokenizers.clip_library import open_clip

    if not model.startswith(LOCAL_PREFIX):
        return bound(open_clip.get_tokenizer(model))
    file = Path(model.removeprefix(LOCAL_PREFIX)) / CONFIG
    _check_config(file)
    # Without this option transformers would ask at the terminal whether to run a Python file of the folder.
    of_transformers = read_object(file)["model_cfg"]["text_cfg"].get("hf_tokenizer_name")
    for options in (file.with_name(name) for name in OPTION_FILES if of_transformers):
        if options.is_file():
            check_words(options, ("vocab_file", "merges_file", "tokenizer_file"))
    try:
        return bound(open_clip.get_tokenizer(model, **({"trust_remote_code": False} if of_transformers else {})))
    except Exception as error:  # open_clip and transformers raise nearly anything for options of other types
        raise cannot_load(str(file), "its tokenizer", error) from error


def check_words(file: Path, names: Iterable[str]) -> None:
    """Whether transformers takes a tokenizer from its own folder. It would read whatever file the options name, and an
    export would hold what is in it.

    Args:
        file: options of the tokenizer.
        names: of options that stand for files.

    Raises:
        ValueError: it takes it from elsewhere.
    """
    options = read_object(file)
    for name in names:
        if options.get(name) is not None:
            raise ValueError(f"{file}: {name} names a file, which is read from the folder alone; remove this line")


def check_names(model: str, pretrained: str | None, key: str) -> None:
    """Whether there is such a model of open_clip. Arguments and errors as of `load_open_clip`."""
    from data.tokenizers.clip_library import open_clip

    if model.startswith(LOCAL_PREFIX):
        if pretrained is not None:
            raise ValueError(f"{key}.pretrained: a local folder has its own weights; give null")
        for name in (CONFIG, WEIGHTS):
            file = Path(model.removeprefix(LOCAL_PREFIX)) / name
            if not file.is_file():
                raise FileNotFoundError(f"{key}.path: no file {file}: name a folder in open_clip's format")
        return
    models = open_clip.list_models()
    if model not in models:
        close = difflib.get_close_matches(model, models, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "open_clip.list_models() lists them"
        raise ValueError(f"{key}.model: open_clip knows no {model}; {hint}")
    if pretrained is None:
        raise ValueError(f"{key}.pretrained: missing; {model} alone has random weights")
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained in tags:
        return
    if Path(pretrained).suffix != ".safetensors":
        raise ValueError(
            f"{key}.pretrained: {pretrained} is neither a .safetensors file nor a tag of {model}; "
            f"tags: {', '.join(tags) or 'none'}"
        )
    if not Path(pretrained).is_file():
        raise FileNotFoundError(f"{key}.pretrained: no file {pretrained}")


def has_quick_gelu(model: str) -> bool:
    """Whether open_clip builds a model of its lists with OpenAI's approximation of the GELU."""
    from data.tokenizers.clip_library import open_clip

    return bool((open_clip.get_model_config(model) or {}).get("quick_gelu"))


def check_activation(model: str, pretrained: str | None, key: str) -> None:
    """Whether a model of open_clip's lists has the activation with which the weights of a tag were trained. open_clip
    warns, and computes other embeddings than the published model.

    Raises:
        ValueError: it has not.
    """
    from data.tokenizers.clip_library import open_clip

    trained = pretrained is not None and (open_clip.get_pretrained_cfg(model, pretrained) or {}).get("quick_gelu")
    if trained and not has_quick_gelu(model):
        raise ValueError(
            f"{key}: {model} has another activation than the one that the weights {pretrained} were trained with; give "
            f"the model {model}-quickgelu"
        )


def check_vocabulary(id: str, tokenizer: Any, rows: int) -> None:
    """Whether a text tower with embeddings of so many tokens knows those of its tokenizer.

    Raises:
        ValueError: it does not.
    """
    size = vocabulary_size(tokenizer)
    if hasattr(tokenizer, "get_vocab"):
        numbers = tokenizer.get_vocab().values()
        if wrong := [number for number in numbers if not isinstance(number, int) or number < 0]:
            raise ValueError(f"{id}: the vocabulary gives {wrong[0]!r:.50} to a token; expected numbers from 0")
        size = max(numbers) + 1  # several names may stand for one token
    if size > rows:
        raise ValueError(f"{id} embeds {rows} tokens, its tokenizer has {size}; they do not fit together")


def vocabulary_size(tokenizer: Any) -> int:
    """Number of tokens of a tokenizer of open_clip or transformers."""
    size = getattr(tokenizer, "vocab_size", None)
    return size if size is not None else len(tokenizer.tokenizer)


def _check_config(file: Path) -> None:
    """Refuse what open_clip would take from a folder's config and fetch, or run as code."""
    config = read_object(file)
    model = object_in(config, "model_cfg", file)
    text, vision, pixels = (
        object_in(model, "text_cfg", file),
        object_in(model, "vision_cfg", file),
        object_in(config, "preprocess_cfg", file, {}),
    )
    if text.get("hf_model_name"):
        raise ValueError(
            f"{file}: text_cfg.hf_model_name names a model of the hub; only open_clip's own text towers are read from "
            "folders"
        )
    timm = vision.get("timm_model_name")
    if timm and (not isinstance(timm, str) or ":" in timm):
        raise ValueError(f"{file}: vision_cfg.timm_model_name is {timm!r}; expected the name of one of timm's models")
    for name in object_in(text, "tokenizer_kwargs", file, {}):
        if name not in TOKENIZER_OPTIONS:
            known = ", ".join(TOKENIZER_OPTIONS)
            raise ValueError(f"{file}: text_cfg.tokenizer_kwargs.{name} is not read from a folder; known: {known}")
    for name, least in (("mean", -math.inf), ("std", 0.0)):
        numbers = pixels.get(name, [1.0] * 3)
        if not (isinstance(numbers, list) and len(numbers) == 3 and all(is_number(n) and n > least for n in numbers)):
            raise ValueError(f"{file}: preprocess_cfg.{name} is {numbers!r:.100}; expected three numbers")
