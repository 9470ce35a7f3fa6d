"""An exported run on tokens put together for sampling: transformer, vocabulary and dVAE."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.image_grid import to_uint8
from data.sources.base import Rejected, Sample
from data.sources.filters import Filter
from data.tokenizers.bpe import Vocabulary
from data.tokenizers.vocabulary_files import VOCABULARY
from data.transforms import resize_and_crop
from recipes.models.autoregressive.sampler import Choice, pad_captions, sample_tokens, uniforms
from recipes.models.autoregressive.task import load_transformer
from recipes.models.autoregressive.transformer import TokenTransformer
from recipes.models.family import ExportParts
from recipes.models.kernels.device_graph import DeviceGraph, has_graphs, memory_pool
from recipes.models.sampling import DTYPES, Precision, SamplingProgress, autocast, check_finite


@dataclass
class TokenPipeline:
    """Captions, and the upper rows of an image if one is given, to images.

    Attributes:
        network: the transformer, on `device`.
        image_encoder: the dVAE, from images to tokens and back.
        vocabulary: byte-pair vocabulary of the captions.
        resolution: side of the training images in pixels.
        device: cpu or cuda.
        precision: of the transformer.
    """

    network: TokenTransformer
    image_encoder: Any
    vocabulary: Vocabulary
    resolution: int
    device: str
    precision: Precision

    def generate(
        self,
        captions: list[str],
        *,
        seeds: list[int],
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance: float = 1.0,
        batch: int = 16,
        picture: Path | None = None,
        rows: int | None = None,
        cuda_graph: bool = True,
    ) -> np.ndarray:
        """One image per caption: (N, H, W, 3) uint8. An image depends on its caption and seed, not on its batch.

        Args:
            captions: N. Equal captions next to each other are cheaper than different ones.
            seeds: N, one per image.
            temperature, top_k, top_p, guidance: see `Choice`.
            batch: images drawn at once.
            picture: an image file whose upper rows are kept, after a crop to its central square.
            rows: number of rows of the token grid that are kept; None: 15 of 32, as in the paper, or the same share.
            cuda_graph: on a GPU, launch all kernels of a token together.

        Raises:
            ValueError: numbers out of range, rows without an image, a file that is not an image, or logits that are
                not finite, such as of a network that overflows.
        """
        if batch < 1:
            raise ValueError(f"--batch must be at least 1, got {batch}")
        choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p, guidance=guidance)
        given = self._given(picture, rows)
        layout = self.network.layout
        grids, progress, done = [], SamplingProgress(len(captions)), 0
        for texts, each in jobs(captions, batch):
            part = seeds[done : done + len(texts) * each]
            done += len(part)
            text = pad_captions([self.vocabulary.encode(caption) for caption in texts], layout.text).to(self.device)
            uniform = uniforms(part, layout.image).unflatten(0, (len(texts), each)).to(self.device)
            with autocast(self.device, self.precision):
                graph = DeviceGraph(memory_pool()) if cuda_graph and has_graphs(text.device) else None
                tokens = sample_tokens(self.network, text, uniform, choice, given.expand(len(texts), -1), graph)
            check_finite((tokens >= 0).all(2).flatten(), self.precision)
            grid = tokens.flatten(0, 1).unflatten(1, (layout.side, layout.side))  # (B, R, R)
            grids.append(to_uint8(self.image_encoder.decode(grid)))
            progress.say(done)
        return np.concatenate(grids)

    def lost_tokens(self, captions: list[str]) -> list[int]:
        """How many tokens at the end of each caption are cut, because the transformer does not take as many."""
        return [max(0, len(self.vocabulary.encode(caption)) - self.network.layout.text) for caption in captions]

    def _given(self, picture: Path | None, rows: int | None) -> Tensor:
        """(1, m) int64, the first m image tokens: those of the upper rows of `picture`."""
        side = self.network.layout.side
        if picture is None:
            if rows is not None:
                raise ValueError("--rows: give the picture whose rows are kept: --picture FILE")
            return torch.zeros(1, 0, dtype=torch.int64, device=self.device)
        rows = max(1, 15 * side // 32) if rows is None else rows
        if not 0 <= rows <= side:
            raise ValueError(f"--rows: {rows}; the grid of tokens has {side} rows")
        path = Path(os.path.expanduser(picture))
        try:
            if path.exists() and not path.is_file():
                raise ValueError(f"--picture: {picture} is not readable as a picture (it is no regular file)")
            data = path.read_bytes()
            found = Filter().decode(Sample(str(picture), data, "a picture"))  # as in training
        except OSError as error:
            raise ValueError(f"--picture: {picture} is not readable as a picture ({error.strerror})") from None
        if isinstance(found, Rejected):
            raise ValueError(f"--picture: {picture} is not readable as a picture ({found.detail})")
        pixels = resize_and_crop(found.image, self.resolution)
        pixels = torch.from_numpy(pixels.copy())[None, None].to(self.device)  # (1, 1, R, R, 3)
        tokens = self.image_encoder.store(pixels).arrays["tokens"][:, 0].long()  # (1, N)
        return tokens[:, : rows * side]


def jobs(captions: list[str], batch: int) -> Iterator[tuple[list[str], int]]:
    """Captions in their order as jobs (different captions, images per caption) of at most `batch` images each.

    Runs of equal captions are cut into parts of at most `batch`; neighbouring parts of equal length share a job.
    """
    runs = [(caption, len(list(same))) for caption, same in itertools.groupby(captions)]
    parts = [(caption, min(batch, count - at)) for caption, count in runs for at in range(0, count, batch)]
    for each, group in itertools.groupby(parts, key=lambda part: part[1]):
        texts = [caption for caption, _ in group]
        together = batch // each
        for start in range(0, len(texts), together):
            yield texts[start : start + together], each


def load(parts: ExportParts) -> TokenPipeline:
    """The pipeline of an export. See `recipes.generation.exports.load_pipeline`.

    Raises:
        ValueError: the vocabulary is another one than the transformer's, whose tokens it may not have.
    """
    parts.image_encoder.need_decoder()
    network = load_transformer(parts.network).eval()
    vocabulary = Vocabulary.read(parts.folder / VOCABULARY)
    if vocabulary.size != network.text_vocabulary:
        raise ValueError(
            f"{vocabulary.where}: {vocabulary.size} entries, and the transformer beside it has "
            f"{network.text_vocabulary} text tokens; copy the export again"
        )
    if parts.precision != "fp32":  # on a machine with 8 GPUs, 8 processes would hold 24 GB of host memory each
        network.cast_blocks(DTYPES[parts.precision], parts.device)
    return TokenPipeline(
        network=network.to(parts.device),
        image_encoder=parts.image_encoder.to(parts.device),
        vocabulary=vocabulary,
        resolution=parts.record["resolution"],
        device=parts.device,
        precision=parts.precision,
    )
