"""CLIP text encoders: OpenCLIP's (as Stable Diffusion 2 uses it, or trained here) and Hugging Face's."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from data.aliases import InputPath
from data.system.log import log
from data.tokenizers.clip_words import bound
from data.tokenizers.tokenizer_files import OPTION_FILES
from recipes.encoders.base import ModelPath, TextEncoder
from recipes.encoders.loading import cannot_load, of_hub
from recipes.encoders.open_clip_models import (
    LOCAL_PREFIX,
    check_names,
    check_vocabulary,
    check_words,
    load_open_clip,
    open_clip_tokenizer,
    vocabulary_size,
)
from recipes.models.config_files import LARGEST, build_from
from recipes.models.json_files import read_object
from recipes.models.sampling import Precision
from recipes.models.weights import read_safetensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"  # of transformers
VOCABULARY, TOKENIZER = "vocab.json", "tokenizer.json"
BLOCKS = "text_model.encoder.layers."  # begins the names of the weights of its blocks
TYPES = ("clip_text_model", "clip")  # of models of transformers that have CLIP's text tower
SEPARATE = "separate_tokenizer"  # folder of an export's copy of a tokenizer that lies outside of the model's folder


def open_clip_text(
    *,
    path: InputPath | None = None,
    model: str = "ViT-H-14",
    pretrained: str | None = None,
    layer: Literal["penultimate", "last"] = "penultimate",
    precision: Literal["fp16", "bf16", "fp32"] = "fp16",
) -> OpenClipText:
    """The text tower of an OpenCLIP model, without its projection. The default layer is that of Stable Diffusion 2.

    Args:
        path: a local folder with open_clip_config.json and open_clip_model.safetensors, instead of the next two keys.
        model: a model of open_clip, or local-dir:FOLDER, which is the same as `path`.
        pretrained: a tag of open_clip's weights (laion2b_s32b_b79k), or a local .safetensors file.
        layer: the block whose output is normalised by the final layer norm and kept.
        precision: number format of inference; on a CPU fp16 becomes fp32.

    Raises:
        FileNotFoundError: a local folder or file is missing.
        ValueError: an unknown model or tag, or a text tower of another kind than CLIP's.
    """
    if path is not None:
        model = LOCAL_PREFIX + str(Path(path).expanduser())
    if pretrained is not None:
        pretrained = os.path.expanduser(pretrained)  # it is no path for the config, which leaves a ~ as it is
    check_names(model, pretrained, "text_encoder")
    id = model.removeprefix(LOCAL_PREFIX) if pretrained is None else f"{model}/{pretrained}"

    def load() -> nn.Module:
        return Tower(load_open_clip(model, pretrained, "text_encoder"), id)

    return OpenClipText(load, id, precision, layer, open_clip_tokenizer(model))


class Tower(nn.Module):
    """The text tower of an OpenCLIP model, up to its token vectors, without the visual tower."""

    def __init__(self, clip: nn.Module, id: str) -> None:
        super().__init__()
        text = getattr(clip, "text", clip)  # CustomTextCLIP has the tower as a module, CLIP has its parts
        positions = getattr(text, "positional_embedding", None)
        if not isinstance(positions, Tensor) or getattr(text, "cls_emb", None) is not None:
            raise ValueError(
                f"text_encoder.model: {id} has no text tower like CLIP's; use another model, or hf_clip_text"
            )
        self.token_embedding = text.token_embedding
        self.positional_embedding = positions  # LD
        self.blocks = text.transformer.resblocks
        self.batch_first = text.transformer.batch_first
        self.ln_final = text.ln_final
        self.register_buffer("attn_mask", text.attn_mask, persistent=False)  # LL, or None

    def forward(self, tokens: Tensor) -> Tensor:
        """Token vectors (B, L, D) of tokens int64 (B, L), after every block and the final layer norm."""
        x = self.token_embedding(tokens) + self.positional_embedding  # BLD
        x = x if self.batch_first else x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, attn_mask=self.attn_mask)
        return self.ln_final(x if self.batch_first else x.transpose(0, 1))


class OpenClipText(TextEncoder):
    """See `open_clip_text`."""

    def __init__(self, load: Callable[[], nn.Module], id: str, precision: Precision, layer: str, tokenize: Any) -> None:
        self.layer = layer
        super().__init__(load, f"{id} ({layer} layer)", precision)
        self.length, self.width = self.module.positional_embedding.shape
        self.tokenize = tokenize
        self.tokenizer_id = f"open_clip {type(tokenize).__name__}, vocabulary {vocabulary_size(tokenize)}"
        if tokenize.context_length != self.length:
            raise ValueError(
                f"text_encoder.model: {id} has {self.length} positions, its tokenizer {tokenize.context_length}; "
                "correct context_length in its config"
            )
        check_vocabulary(f"text_encoder: {id}", tokenize, self.module.token_embedding.num_embeddings)

    @torch.no_grad()
    def encode_tokens(self, tokens: Tensor, exact: bool = False) -> Tensor:
        """See `TextEncoder.encode_tokens`."""
        return self._network(exact)[0](tokens).float()

    def for_transformers(self) -> tuple[Any, Any]:
        """See `TextEncoder.for_transformers`."""
        from recipes.encoders.clip_layout import clip_text_model, clip_tokenizer

        tokenizer = clip_tokenizer(self.tokenize, self.id)
        return clip_text_model(self._network(exact=True)[0], self.id, tokenizer), tokenizer

    def _prepare(self, module: nn.Module) -> nn.Module:
        if self.layer == "penultimate":
            module.blocks = module.blocks[:-1]
        return module


def hf_clip_text(
    *,
    path: ModelPath,
    subfolder: str | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    layer: Literal["penultimate", "last"] = "last",
    precision: Literal["fp16", "bf16", "fp32"] = "fp16",
) -> HFClipText:
    """A `CLIPTextModel` of transformers. Only safetensors are read.

    Stable Diffusion 2's own pipeline stores ViT-H/14 without its last block: there "last" is already the penultimate
    layer of the original.

    Args:
        path: hub id (owner/name), or a local folder with config.json, model.safetensors and the tokenizer's files, as
            transformers 4 or 5 wrote them.
        subfolder: folder of the model inside `path`, such as "text_encoder" in a whole pipeline.
        tokenizer: folder of the tokenizer inside `path`, such as "tokenizer"; of a local `path`, it may also be an
            absolute path; null: that of the model.
        revision: branch, tag or commit of a hub id.
        layer: the block whose output is normalised by the final layer norm and kept.
        precision: number format of inference; on a CPU fp16 becomes fp32.

    Raises:
        FileNotFoundError: a local folder lacks one of its files.
        ValueError: a model of another type, such as T5, or one that lacks weights or blocks for them, or cannot be
            loaded.
    """
    from transformers import CLIPTextConfig, CLIPTextModel

    local = Path(path).expanduser().is_dir()
    root = str(Path(path).expanduser()) if local else path
    folder, words = Path(root) / (subfolder or ""), subfolder if tokenizer is None else tokenizer
    if lies_outside(tokenizer or "") and Path(root, SEPARATE).is_dir():  # in an export
        words = SEPARATE
    if local:
        words_file, one_file = (Path(root, words or "", name) for name in (VOCABULARY, TOKENIZER))
        for file in (folder / CONFIG, folder / WEIGHTS, one_file if one_file.is_file() else words_file):
            if not file.is_file():
                raise FileNotFoundError(f"text_encoder.path: no file {file}: name a CLIP text model")
    source = {"revision": revision or "main", "local_files_only": local}

    id = path if subfolder is None else f"{path}/{subfolder}"

    def load() -> nn.Module:
        def opened(config: dict[str, Any] | None = None) -> tuple[nn.Module, dict[str, Any]]:
            return CLIPTextModel.from_pretrained(
                root,
                subfolder=subfolder or "",
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="sdpa",  # else a config may name a repository of the hub, whose code would run
                key_mapping={r"^(embeddings|encoder|final_layer_norm)\.": r"text_model.\1."},  # names of version 5
                output_loading_info=True,
                **source,
            )

        try:
            if local:
                config = read_object(folder / CONFIG)
            else:
                config, _ = of_hub(
                    "text_encoder.path",
                    path,
                    lambda: CLIPTextConfig.get_config_dict(root, subfolder=subfolder or "", **source),
                )
            check_labels(f"text_encoder.path: {id}", config)
            kind = config.get("model_type", CLIPTextConfig.model_type)
            if kind not in TYPES:
                raise ValueError(f"text_encoder.path: {id} is a model of the type {kind!s:.50}; name a CLIP text model")
            if local:
                module, found = build_from(folder / CONFIG, opened, read_safetensors(folder / WEIGHTS))
            else:
                module, found = of_hub("text_encoder.path", path, opened)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise cannot_load("text_encoder.path", path, error) from error
        if missing := found["missing_keys"]:  # transformers draws random numbers for them
            raise ValueError(f"text_encoder.path: {id} lacks weights, such as {sorted(missing)[0]}; copy it again")
        # Files may also hold an image tower. Of the blocks of a text model, transformers would leave out the last.
        if left := sorted(name for name in found["unexpected_keys"] if name.startswith(BLOCKS)):
            raise ValueError(
                f"text_encoder.path: {id} has weights that its {CONFIG} has no layers for, such as {left[0]}; copy it "
                "again"
            )
        return module

    try:
        tokenize = _tokenizer(root, words or "", source)
    except Exception as error:  # on files in another format, transformers raises nearly anything
        raise cannot_load("text_encoder.path", path, error, is_hub_id=not local) from error
    return HFClipText(load, id, precision, layer, tokenize)


def _tokenizer(root: str, words: str, source: dict[str, Any]) -> Any:
    """CLIP's tokenizer in a folder or in a repository of the hub. Version 5 of transformers writes tokenizer.json only,
    for which version 4 has another class."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError
    from transformers import CLIPTokenizer, CLIPTokenizerFast
    from transformers.utils import cached_file

    if source["local_files_only"]:
        found = Path(root, words, VOCABULARY).is_file()
    else:  # transformers goes on without a file that it could not fetch, and fails with a TypeError
        where = {"repo_id": root, "subfolder": words or None, "revision": source["revision"]}
        try:
            hf_hub_download(filename=VOCABULARY, **where)
            found = True
        except EntryNotFoundError:
            hf_hub_download(filename=TOKENIZER, **where)
            found = False
    kind = CLIPTokenizer if found else CLIPTokenizerFast
    for name in (*OPTION_FILES, CONFIG):  # transformers also reads the model's config, to find the tokenizer's class
        file = cached_file(root, name, subfolder=words, _raise_exceptions_for_missing_entries=False, **source)
        if file is not None and name == CONFIG:
            check_labels(file, read_object(Path(file)))
        elif file is not None:
            check_words(Path(file), kind.vocab_files_names)
    tokenizer = kind.from_pretrained(root, subfolder=words, **source)
    if found:
        _warn_of_lost_merges(tokenizer, Path(root, words))
    # Options without a token to pad with, or with a length that is no number, show only when captions are encoded.
    _Padded(tokenizer, min(8, tokenizer.model_max_length))([""])
    return bound(tokenizer)


def check_labels(what: str, config: dict[str, Any]) -> None:
    """Whether transformers can read a config: it makes a name of each of `num_labels`, which no text encoder has.

    Args:
        what: begins the error.
        config: of a model, in which there may be others.

    Raises:
        ValueError: they would take minutes, and then all memory.
    """
    labels = config.get("num_labels")
    if isinstance(labels, int) and labels > LARGEST:
        raise ValueError(f"{what}: num_labels is {labels}, of each of which a name would be made; remove this line")
    for inner in config.values():
        if isinstance(inner, dict):
            check_labels(what, inner)


def _warn_of_lost_merges(tokenizer: Any, folder: Path) -> None:
    """A line if no merge makes some entries of the vocabulary, as where the file of the merges was cut off at the end
    of a line: their words would be encoded as smaller parts, on which the model was not trained."""
    letters, made = set(tokenizer.byte_encoder.values()), {"".join(pair) for pair in tokenizer.bpe_ranks}
    known = made | letters | {f"{letter}</w>" for letter in letters} | set(tokenizer.all_special_tokens)
    lost = [word for word in tokenizer.encoder if word not in known]
    if lost:
        log.warning(
            f"text_encoder: {folder}: no line of merges.txt makes {len(lost)} of the {len(tokenizer.encoder)} entries "
            f"of {VOCABULARY}, such as {lost[0]!r:.40}, which no caption is encoded with; copy the files again if one "
            "was cut"
        )


def lies_outside(part: str) -> bool:
    """Whether the name of a folder inside of another one may lead out of it."""
    return Path(part).is_absolute() or ".." in Path(part).parts


class HFClipText(TextEncoder):
    """See `hf_clip_text`."""

    def __init__(
        self, load: Callable[[], nn.Module], id: str, precision: Precision, layer: str, tokenizer: Any
    ) -> None:
        self.layer = layer
        super().__init__(load, f"{id} ({layer} layer)", precision)
        self.length = min(self.module.config.max_position_embeddings, tokenizer.model_max_length)
        self.width = self.module.config.hidden_size
        self.tokenize = _Padded(tokenizer, self.length)
        self.tokenizer_id = f"transformers {type(tokenizer).__name__}, vocabulary {len(tokenizer)}"
        check_vocabulary(f"text_encoder: {id}", tokenizer, self.module.config.vocab_size)

    @torch.no_grad()
    def encode_tokens(self, tokens: Tensor, exact: bool = False) -> Tensor:
        """See `TextEncoder.encode_tokens`."""
        return self._network(exact)[0](input_ids=tokens).last_hidden_state.float()

    def for_transformers(self) -> tuple[Any, Any]:
        """See `TextEncoder.for_transformers`."""
        model, tokenizer = copy.deepcopy(self._network(exact=True)[0]).cpu(), copy.deepcopy(self.tokenize.tokenizer)
        tokenizer.model_max_length = self.length
        return model, tokenizer

    def _prepare(self, module: nn.Module) -> nn.Module:
        if self.layer == "penultimate":
            module.text_model.encoder.layers = module.text_model.encoder.layers[:-1]
            module.config.num_hidden_layers -= 1
        return module


class _Padded:
    """A tokenizer of transformers that pads or cuts all captions to one length."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length

    def __call__(self, captions: list[str]) -> Tensor:
        """int64 (B, length)."""
        rows = self.tokenizer(captions, padding="max_length", max_length=self.length, truncation=True)
        return torch.tensor(rows["input_ids"], dtype=torch.int64)
