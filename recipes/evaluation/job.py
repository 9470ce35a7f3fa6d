"""The work of an evaluation: images drawn and turned into features, chunk by chunk, by any number of ranks.

A chunk is a fixed range of captions. Its images depend on the captions and the seed alone, so who draws it, and beside
what, does not matter. Finished chunks are files: an interrupted evaluation goes on with the missing ones, also with
another number of ranks. Ranks share nothing but this folder, and need no process group.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.system.arrays import damage_named
from data.system.errors import WrongResult
from data.system.files import atomic_write
from data.system.log import log
from data.system.ranks import Rank
from recipes.evaluation.config import Evaluation
from recipes.evaluation.variants import Variant, distinct, variants
from recipes.models.sampling import check_images
from recipes.scoring.reference import blurred, fingerprint
from recipes.scoring.reranking import IMAGES_AT_ONCE, Reranker

POLL = 0.2  # seconds between looks at what other ranks have finished
NAMED = 60.0  # seconds of waiting after which it is said what is waited for


def resolution_of(options: dict[str, Any], pipeline: Any) -> int:
    """Side in pixels of the images that a pipeline draws with these options."""
    return options.get("resolution") or pipeline.resolution


@dataclass
class Job:
    """Draws a config's images.

    Attributes:
        config: of the evaluation.
        captions: one per image.
        pipeline: of the export.
        extractor: a `Features`.
        clip: scores images and captions; None: no metric asks for it.
        reranker: takes the best of a pool; None: no pools.
        identity: what the images depend on besides the captions and the options, such as the weights.
        folder: of finished chunks.
    """

    config: Evaluation
    captions: list[str]
    pipeline: Any
    extractor: Any
    clip: Reranker | None
    reranker: Reranker | None
    identity: dict[str, Any]
    folder: Path

    def run(self, rank: Rank) -> None:
        """Draw this rank's share of the chunks that are not finished.

        The first chunk of each variant comes first, so that a value that cannot be, such as an unknown sampler at the
        end of a sweep, is not met hours later.
        """
        for variant, start in rank.share(sorted(self.chunks(), key=lambda chunk: chunk[1] > 0)):
            file = self.file(variant, start)
            if not file.is_file():
                with _located(variant):
                    arrays = self.draw(variant, start)
                with atomic_write(file) as partial, open(partial, "wb") as stream:
                    np.savez(stream, **arrays)

    def chunks(self) -> Iterator[tuple[Variant, int]]:
        """The first captions of the chunks of every variant, once where variants have the same images."""
        for variant in distinct(variants(self.config)):
            for start in range(0, len(self.captions), self.config.chunk):
                yield variant, start

    def file(self, variant: Variant, start: int) -> Path:
        """Where a chunk is stored. The name changes with everything that its numbers depend on."""
        facts = {
            **self.identity,
            "captions": self.captions[start : start + self.config.chunk],
            "start": start,
            "total": len(self.captions),
            "seed": self.config.seed,
            "options": variant.options,
            "pools": variant.pools,
            "radii": variant.radii,
        }
        return self.folder / f"{fingerprint(facts)}.npz"

    def draw(self, variant: Variant, start: int) -> dict[str, np.ndarray]:
        """The arrays of a chunk: `features`, `logits` and `scores`, each followed by a radius or the size of a pool."""
        captions = self.captions[start : start + self.config.chunk]
        if variant.pools:
            return self._draw_pools(variant, captions, start)
        images = self._images(captions, range(start, start + len(captions)), variant.options)
        arrays: dict[str, np.ndarray] = {}
        for radius in variant.radii:
            arrays |= self._measure(blurred(images, radius), captions, radius)
        return arrays

    def _draw_pools(self, variant: Variant, captions: list[str], start: int) -> dict[str, np.ndarray]:
        """The best of the first k candidates, for each k. The first one is the image without a pool.

        Candidates of a caption are drawn side by side, as many as a batch takes: token models compute, keep and read
        the text once for all of them.
        """
        best = np.full(len(captions), -np.inf, np.float32)
        kept: np.ndarray | None = None
        arrays: dict[str, np.ndarray] = {}
        together = max(1, min(self.config.batch, IMAGES_AT_ONCE // len(captions)))
        for first in range(0, max(variant.pools), together):
            numbers = range(first, min(first + together, max(variant.pools)))
            drawn = [caption for caption in captions for _ in numbers]
            places = [start + i + number * len(self.captions) for i in range(len(captions)) for number in numbers]
            images = self._images(drawn, places, variant.options)  # (C * n, H, W, 3)
            scores = self.reranker.scores(drawn, images).reshape(len(captions), -1)  # (C, n)
            images = images.reshape(*scores.shape, *images.shape[1:])
            for place, number in enumerate(numbers):
                better = scores[:, place] > best
                kept = images[:, 0].copy() if kept is None else kept
                kept[better] = images[better, place]
                best[better] = scores[better, place]
                if number + 1 in variant.pools:
                    arrays |= self._measure(kept, captions, number + 1)
        return arrays

    def _images(self, captions: list[str], numbers: Iterable[int], options: dict[str, Any]) -> np.ndarray:
        """(N, H, W, 3) uint8, one image per caption, drawn from the seed plus its number."""
        seeds = [self.config.seed + number for number in numbers]
        images = self.pipeline.generate(captions, seeds=seeds, batch=self.config.batch, **options)
        images = check_images(images, len(captions))
        side, (height, width) = resolution_of(options, self.pipeline), images.shape[1:3]
        if (height, width) != (side, side):  # the reference gets that side, and figures depend on it
            raise WrongResult(
                f"generate() of the pipeline returns images of {width} x {height} pixels, and its `resolution` is "
                f"{side}, to which the reference is resized; return images of that side, or of an option `resolution`"
            )
        return images

    def _measure(self, images: np.ndarray, captions: list[str], label: int) -> dict[str, np.ndarray]:
        arrays = self.extractor(images)
        if self.clip is not None:
            arrays["scores"] = self.clip.scores(captions, images)
        return {f"{name}_{label}": array for name, array in arrays.items()}

    def collect(self, variant: Variant) -> dict[int, dict[str, np.ndarray]]:
        """A variant's arrays over all captions, by radius or size of the pool. Waits for chunks of other ranks. Raises
        ValueError if the file of a chunk is damaged."""
        parts = []
        for start in range(0, len(self.captions), self.config.chunk):
            file = self.file(variant, start)
            self._wait(file)
            with (
                damage_named(file, "delete it and start the same command again"),
                np.load(file, allow_pickle=False) as arrays,
            ):
                parts.append(dict(arrays))
        found: dict[int, dict[str, np.ndarray]] = {}
        for name in parts[0]:
            kind, _, label = name.rpartition("_")
            found.setdefault(int(label), {})[kind] = np.concatenate([part[name] for part in parts])
        return found

    def _wait(self, file: Path) -> None:
        """Wait for a chunk of another rank. A rank that has died is not seen from here, so that the wait is named."""
        waited = 0.0
        while not file.is_file():
            if waited >= NAMED:
                missing = sum(not self.file(variant, start).is_file() for variant, start in self.chunks())
                log.info(
                    f"evaluate: waiting for {missing} chunks of other ranks. If one of them has ended, stop this "
                    "one and run the same command again: finished chunks are kept"
                )
                waited = 0.0
            time.sleep(POLL)
            waited += POLL


@contextmanager
def _located(variant: Variant) -> Iterator[None]:
    """Inside, images are drawn. What the pipeline refuses names the key of the config."""
    try:
        yield
    except ValueError as error:
        if type(error) is ValueError:  # not by an error of its own: that would hide where a library failed
            section = "sweeps" if "=" in variant.name else "sampling"
            option = re.match(r"\w*", str(error))[0] in variant.options
            error.args = (f"{section}{'.' if option else ': '}{error}",)
        raise
