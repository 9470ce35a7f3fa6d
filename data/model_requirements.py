"""Whether data is of the kind that a model is trained on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

CAPTION_VOCABULARY = 49408  # of open_clip's byte-pair tokenizer, by which `pictures` encodes captions


def check_kind(kind: str, requirements: Collection[str], known: Collection[str]) -> None:
    """
    Args:
        kind: name of the data component.
        requirements: names of what the model needs, see `Task.requirements`.
        known: those that the component has.

    Raises:
        ValueError: the model needs something else, so it is trained on data of another kind.
    """
    other = [name for name in requirements if name not in known]
    if other:
        raise ValueError(
            f"{kind}: the model is trained on data with {', '.join(other)}, which {kind} do not have; use the data "
            "component of the model's recipes in yamls/"
        )


def check_pictures(requirements: dict[str, Any], resolution: int, tokens: int | None) -> None:
    """Compare images and captions with what a model needs.

    Args:
        requirements: `picture_size`: side of the images; `side_multiple`: number of pixels of which it must be a
            multiple; `context_length`: tokens per caption; `caption_vocabulary`: the largest number of tokens.
        resolution: side of the images in pixels.
        tokens: tokens per caption, None for none.

    Raises:
        ValueError: they do not fit.
    """
    check_kind("pictures", requirements, ("picture_size", "side_multiple", "context_length", "caption_vocabulary"))
    size, multiple = requirements.get("picture_size", resolution), requirements.get("side_multiple", 1)
    if resolution != size or resolution % multiple:
        wanted = f"{size}" if resolution != size else f"a multiple of {multiple}"
        raise ValueError(f"pictures: resolution: {resolution}; give the side of the model's images, {wanted}")
    length = requirements.get("context_length", tokens)
    if tokens != length:
        given = "null" if tokens is None else tokens
        raise ValueError(f"pictures: tokens: {given}; give the model's number of tokens per caption, {length}")
    vocabulary = requirements.get("caption_vocabulary", CAPTION_VOCABULARY)
    if tokens is not None and vocabulary < CAPTION_VOCABULARY:
        raise ValueError(
            f"pictures: captions have {CAPTION_VOCABULARY} different tokens, the model {vocabulary}; give the model "
            "as many or more"
        )
