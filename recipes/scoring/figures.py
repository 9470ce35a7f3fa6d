"""Figures of sets of pictures from their features, by torch-fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which figures are computed, and how.

    Attributes:
        metrics: any of fid, kid, inception_score, precision_recall and clip_score.
        kid_subsets: number of KID's subsets.
        kid_subset_size: pictures per subset of KID. Subsets of more than half of the pictures have much in common, and
            those of all of them no deviation.
        neighbours: neighbours that span a sphere of precision and recall.
        splits: parts over which the Inception Score is averaged.
    """

    metrics: Sequence[str]
    kid_subsets: int = 100
    kid_subset_size: int = 1000
    neighbours: int = 3
    splits: int = 10


def figures(config: Settings, generated: dict[str, np.ndarray], reference: np.ndarray) -> dict[str, float]:
    """The figures that the settings name, rounded to 6 digits.

    Args:
        config: the settings.
        generated: features (N, D); logits (N, K) and scores (N,) where the metrics need them.
        reference: features (M, D) of the reference.

    Raises:
        ValueError: fewer pictures than a metric needs, or features that are not finite.
    """
    features = generated["features"]
    check_counts(config, len(features), len(reference))
    if not np.isfinite(features).all() or not np.isfinite(reference).all():
        raise ValueError("extractor: features are not finite; evaluate in fp32, and look at the images")
    one, other = torch.from_numpy(features).double(), torch.from_numpy(reference).double()
    found: dict[str, float] = {}
    if "fid" in config.metrics:
        statistics = [fid_features_to_statistics(part) for part in (one, other)]
        found["fid"] = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    if "kid" in config.metrics:
        values = kid_features_to_metric(
            one, other, kid_subsets=config.kid_subsets, kid_subset_size=config.kid_subset_size, rng_seed=2020,
            verbose=False,
        )  # fmt: skip
        found["kid"] = values["kernel_inception_distance_mean"]
        found["kid_std"] = values["kernel_inception_distance_std"]
    if "precision_recall" in config.metrics:
        values = prc_features_to_metric(
            one, other, prc_neighborhood=config.neighbours, prc_batch_size=10_000, save_cpu_ram=True, verbose=False
        )
        found["precision"], found["recall"] = values["precision"], values["recall"]
    if "inception_score" in config.metrics:
        values = isc_features_to_metric(torch.from_numpy(generated["logits"]), splits=config.splits)
        found["inception_score"] = values["inception_score_mean"]
        found["inception_score_std"] = values["inception_score_std"]
    if "clip_score" in config.metrics:
        # Each image counts at least 0, as Hessel et al. 2021 define it; torchmetrics takes the mean first.
        found["clip_score"] = float(100 * generated["scores"].clip(min=0).mean())
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def check_counts(config: Settings, generated: int, reference: int) -> None:
    """
    Raises:
        ValueError: fewer pictures than a metric needs.
    """
    needs = {
        "fid": (2, ""),
        "kid": (config.kid_subset_size, "; or make kid_subset_size smaller"),
        "precision_recall": (config.neighbours + 1, "; or make neighbours smaller"),
    }
    for name, (count, advice) in needs.items():
        for side, number in (("generated", generated), ("reference", reference)):
            if name in config.metrics and number < count:
                raise ValueError(f"{name} needs {count} {side} pictures, and there are {number}{advice}")
    if "inception_score" in config.metrics and generated < config.splits:
        raise ValueError(f"inception_score needs {config.splits} images, and there are {generated}; or fewer splits")
