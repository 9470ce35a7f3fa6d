"""Choosing the best images for a caption by a contrastive model (DALL-E, Ramesh et al. 2021, section 2.6)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recipes.encoders.base import weights_hash
from recipes.encoders.open_clip_models import (
    CONFIG,
    LOCAL_PREFIX,
    check_activation,
    check_vocabulary,
    has_quick_gelu,
    load_open_clip,
    open_clip_tokenizer,
    words_of,
)
from recipes.models.sampling import check_images

IMAGES_AT_ONCE = 4096  # candidates in memory, of which few are kept: 0.8 GB at 256 x 256 pixels


class Reranker:
    """An open_clip model that scores how well an image fits a caption.

    Args:
        name: a folder in open_clip's format, such as the export of a `contrastive_text` run, or MODEL/TAG as open_clip
            lists them.
        device: device of the model.
        key: option, or key of the config, that names it, for messages.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: open_clip has no such model or tag, it cannot be loaded, or see `check_activation`.
    """

    def __init__(self, name: str, device: str, key: str = "--rerank") -> None:
        from data.tokenizers.clip_library import open_clip

        folder = Path(os.path.expanduser(name))
        model, _, tag = name.partition("/")
        known = model in open_clip.list_models() and tag and not folder.exists()
        if not known and not (folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"{key}: no file {folder / CONFIG}; give a folder in open_clip's format, or MODEL/TAG of its lists"
            )
        if known:
            check_activation(model, tag, key)
        self.quick_gelu = known and has_quick_gelu(model)
        model, tag = (model, tag) if known else (f"{LOCAL_PREFIX}{folder}", None)
        self.network: Any = load_open_clip(model, tag, key).to(device).eval()
        self.tokenize = open_clip_tokenizer(model)
        if not known:
            rows = getattr(getattr(self.network, "text", self.network), "vocab_size", 0)
            check_vocabulary(f"{key}: {folder}", self.tokenize, rows)
        self.device = device
        self.named = f"{key}: {name}"
        visual = self.network.visual
        size = visual.image_size
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        mean, std = (torch.tensor(visual.preprocess_cfg[key], device=device) for key in ("mean", "std"))
        self.mean, self.std = mean[:, None, None], std[:, None, None]
        # As open_clip's own transform: "random", of training, is bicubic in evaluation.
        self.filter = "bilinear" if visual.preprocess_cfg.get("interpolation") == "bilinear" else "bicubic"
        self.config = None if known else folder / CONFIG

    def hash(self) -> str:
        """sha256 of the weights, and of the activation and the filter, or a folder's config and tokenizer: by another
        activation, mean of pixels or tokenizer, the same weights give other embeddings."""
        weights = weights_hash(self.network)
        if self.config is not None:
            files = [self.config, *words_of(self.config.parent)]
            return hashlib.sha256(weights.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()
        differs = ("quick_gelu" if self.quick_gelu else "") + ("bilinear" if self.filter == "bilinear" else "")
        return hashlib.sha256(f"{weights}{differs}".encode()).hexdigest() if differs else weights

    @torch.no_grad()
    def scores(self, captions: list[str], images: np.ndarray, batch: int = 64) -> np.ndarray:
        """The cosine similarity of the embeddings of each image and its caption, (N,) float32.

        Args:
            captions: N.
            images: (N, H, W, 3) uint8.
            batch: images embedded at once.
        """
        places = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
        texts = self.embed_captions(list(places), batch)  # a caption has many candidates
        return (self.embed_images(images, batch) * texts[[places[caption] for caption in captions]]).sum(1)

    @torch.no_grad()
    def embed_images(self, images: np.ndarray, batch: int = 64) -> np.ndarray:
        """Embeddings (N, E) float32 of length 1, of images (N, H, W, 3) uint8."""
        parts = (torch.from_numpy(images[i : i + batch]).to(self.device) for i in range(0, len(images), batch))
        found = [self.network.encode_image(self._prepare(pixels), normalize=True) for pixels in parts]  # (B, E) each
        return self._finite(torch.cat(found))

    @torch.no_grad()
    def embed_captions(self, captions: list[str], batch: int = 64) -> np.ndarray:
        """Embeddings (N, E) float32 of length 1, of N captions."""
        parts = (self.tokenize(captions[i : i + batch]).to(self.device) for i in range(0, len(captions), batch))
        found = [self.network.encode_text(texts, normalize=True) for texts in parts]  # (B, E) each
        return self._finite(torch.cat(found))

    def _finite(self, embeddings: Tensor) -> np.ndarray:
        """Embeddings as an array. Without numbers, no caption would fit an image better than its own, and the first
        candidate would be the best."""
        if not embeddings.isfinite().all():
            raise ValueError(f"{self.named}: gives embeddings that are not finite; check its weights")
        return embeddings.float().cpu().numpy()

    def _prepare(self, pixels: Tensor) -> Tensor:
        """Images uint8 (B, H, W, 3) to the input of the image tower, (B, 3, h, w) float32."""
        images = pixels.permute(0, 3, 1, 2).float() / 255
        if images.shape[2:] != self.size:
            images = nn.functional.interpolate(images, self.size, mode=self.filter, antialias=True).clamp(0, 1)
        return (images - self.mean) / self.std


def best(scores: np.ndarray, candidates: int, keep: int) -> np.ndarray:
    """Indices of the best images of each caption, the best first.

    Args:
        scores: (captions * candidates,), with the candidates of each caption next to each other.
        candidates: images per caption.
        keep: images kept per caption.

    Returns:
        (captions * keep,) indices into `scores`.
    """
    order = np.argsort(-scores.reshape(-1, candidates), axis=1, kind="stable")[:, :keep]
    return (order + candidates * np.arange(len(order))[:, None]).reshape(-1)


def draw_best(
    generate: Callable[..., np.ndarray],
    captions: list[str],
    seed: int,
    reranker: Reranker | None,
    candidates: int = 1,
    keep: int = 1,
) -> tuple[np.ndarray, list[str]]:
    """Draw candidates for each caption and keep the best.

    Args:
        generate: a pipeline's method, (captions, seeds=seeds) -> (N, H, W, 3) uint8.
        captions: N.
        seed: candidate i of all is drawn by seed + i.
        reranker: says which are the best; None: all are kept, `keep` per caption.
        candidates: images drawn per caption.
        keep: images kept per caption.

    Returns:
        Images (N * keep, H, W, 3) uint8 in the order of the captions, the best of each caption first, and their
        captions.
    """
    drawn = [caption for caption in captions for _ in range(candidates)]
    seeds = [seed + i for i in range(len(drawn))]
    if reranker is None:
        return check_images(generate(drawn, seeds=seeds), len(drawn)), drawn
    parts = []
    step = candidates * max(1, IMAGES_AT_ONCE // candidates)  # the candidates of a caption stay together
    for part in (slice(start, start + step) for start in range(0, len(drawn), step)):
        images = check_images(generate(drawn[part], seeds=seeds[part]), len(drawn[part]))
        parts.append(images[best(reranker.scores(drawn[part], images), candidates, keep)])
    return np.concatenate(parts), [caption for caption in captions for _ in range(keep)]
