"""The keys of an evaluation. Nothing slow is imported here: mistakes are reported before torch is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from recipes.config.values import ConfigError


@dataclass(kw_only=True)
class Extractor:
    """The network whose features the metrics compare."""

    kind: Literal["inception", "contrastive"] = "inception"
    """inception: InceptionV3 as FID defines it (torch-fidelity); contrastive: the image tower of an open_clip model.
    Compare its metrics only with those of the same image tower."""
    path: str | None = None
    """inception: local file of the weights, null to fetch them from torch-fidelity's release; contrastive: an open_clip
    folder, such as the export of a contrastive_text run, or MODEL/TAG."""


@dataclass(kw_only=True)
class Reference:
    """The images that generated ones are compared with, and the source of the captions."""

    source: Annotated[Any, "source"]
    """Images with captions."""
    images: int | None = None
    """Number of images, drawn without replacement; null: all."""


@dataclass(kw_only=True)
class Rerank:
    """Metrics by the number of candidates from which a contrastive model takes the best image (DALL-E, figure 9c)."""

    by: str
    """The contrastive model: an open_clip folder, or MODEL/TAG."""
    pools: list[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    """Numbers of candidates per caption."""

    def __post_init__(self) -> None:
        self.pools = list(self.pools)


@dataclass(kw_only=True)
class Evaluation:
    """An evaluation of an export."""

    out: str
    """Folder of the report, of the reference's features, and of finished work, from which an interrupted evaluation
    continues."""
    reference: Reference
    """The images that generated ones are compared with, and the source of the captions."""
    images: int | None = None
    """Number of generated images, one per caption; null: one per caption of the reference."""
    seed: int = 0
    """Image i is drawn from seed + i. The seed also determines which captions and reference images are drawn."""
    metrics: list[Literal["fid", "kid", "inception_score", "precision_recall", "clip_score"]] = ("fid", "kid")
    """Metrics to compute."""
    extractor: Extractor = field(default_factory=Extractor)
    """The network whose features the metrics compare."""
    clip: str | None = None
    """The contrastive model of clip_score: an open_clip folder, or MODEL/TAG."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Options of the model's family as `recipes/generate.py` has them: guidance, steps, sampler, temperature, ..."""
    sweeps: dict[str, list[Any]] = field(default_factory=dict)
    """Options of sampling, each with a list of values to compare, such as guidance: [1, 2, 4, 8]."""
    rerank: Rerank | None = None
    """Metrics by the number of candidates per caption; null: none."""
    blur: list[int] = (0,)
    """Radii in pixels of a Gaussian blur of generated and reference images (DALL-E, figures 9a and 9b); 0: no blur."""
    kid_subsets: int = 100
    """Number of random subsets over which KID is averaged."""
    kid_subset_size: int = 1000
    """Images per subset of KID, at most as many as there are. If it is more than half of all images, the subsets
    overlap and `kid_std` is too small; if it is all of them, `kid_std` is 0."""
    neighbours: int = 3
    """k of precision and recall: the distance to the k-th nearest neighbour is the radius of a sphere."""
    splits: int = 10
    """Number of parts into which the images are divided for the Inception Score."""
    weights: Literal["ema", "raw"] | None = None
    """ema: averaged weights; raw: those of the last batch; null: averaged weights if there are any."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: a GPU if there is one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the network."""
    batch: int = 16
    """Images drawn at once. Results depend on it by rounding only."""
    chunk: int = 64
    """Captions per unit of work, which one rank finishes and stores."""

    def __post_init__(self) -> None:
        self.metrics, self.blur = list(self.metrics), list(self.blur)
        self.out = os.path.expanduser(self.out)
        lines = []
        if "://" in self.out:
            lines.append(f"out: {self.out} is remote; give a local folder, and copy that")
        if not self.metrics:
            lines.append("metrics: empty; name at least one")
        if self.extractor.kind == "contrastive" and self.extractor.path is None:
            lines.append("extractor.path: missing; name the contrastive model's folder")
        if self.extractor.kind == "contrastive" and "inception_score" in self.metrics:
            lines.append("metrics: inception_score needs classes, which a contrastive model does not have; remove it")
        if "clip_score" in self.metrics and self.clip is None:
            lines.append("clip: missing; name the contrastive model of clip_score")
        for name in ("batch", "chunk", "images", "kid_subset_size", "kid_subsets", "neighbours", "splits"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                lines.append(f"{name}: {getattr(self, name)}; give 1 or more")
        if self.reference.images is not None and self.reference.images < 1:
            lines.append(f"reference.images: {self.reference.images}; give 1 or more, or null for all")
        if not 0 <= self.seed < 2**62:  # generators take 64 bits, and the number of an image is added
            lines.append(f"seed: {self.seed}; give 0 or more, below 2^62")
        if 0 not in self.blur or min(self.blur) < 0:
            lines.append(f"blur: {self.blur}; give radii of 0 or more, 0 among them")
        if self.rerank is not None and (not self.rerank.pools or min(self.rerank.pools) < 1):
            lines.append(f"rerank.pools: {self.rerank.pools}; give sizes of 1 or more")
        for name, values in self.sweeps.items():
            if not values:
                lines.append(f"sweeps.{name}: empty; give at least one value")
        if lines:
            raise ConfigError(lines)
