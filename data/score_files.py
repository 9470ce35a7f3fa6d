"""Scores of the pairs of a set: a contrastive model's embeddings of its images, and how well captions fit.

They lie beside the shards of an encoded set::

    SET/scores/facts.json         the model, a hash of its weights, and the filter that pairs passed
    SET/scores/shards/<id>.npz    an input shard: `keys` (JSON text of N), `embeddings` (N, E) float16,
                                  `similarities` (N,) float32
    SET/scores/summary.json       figures of all shards
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.system.arrays import damage_named
from data.system.files import atomic_write, read_object

FOLDER, FACTS, SUMMARY = "scores", "facts.json", "summary.json"


@dataclass(frozen=True)
class ShardScores:
    """The scores of an input shard.

    Attributes:
        keys: N, in the source's order.
        embeddings: (N, E) float16, of the images, of length 1.
        similarities: (N,) float32, the cosine similarity of each image's and caption's embeddings.
    """

    keys: list[str]
    embeddings: np.ndarray
    similarities: np.ndarray


def score_file(folder: Path, shard: str) -> Path:
    """The file of an input shard in a folder of scores."""
    return folder / "shards" / f"{shard}.npz"


def write_scores(file: Path, scores: ShardScores) -> None:
    """Write a shard's scores, atomically."""
    arrays = {"embeddings": scores.embeddings, "similarities": scores.similarities}
    with atomic_write(file) as partial, open(partial, "wb") as stream:
        np.savez(stream, keys=np.array(json.dumps(scores.keys)), **arrays)


def read_scores(folder: Path, shard: str, embeddings: bool = True) -> ShardScores:
    """Read a shard's scores.

    Args:
        folder: of the scores.
        shard: id of the input shard.
        embeddings: whether they are read, which are nearly all of the file; if not, they are (0, 0).

    Raises:
        FileNotFoundError: there are none.
        OSError: of the disk, as where a mount is lost.
        ValueError: the file is damaged.
    """
    file = score_file(folder, shard)
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; finish precompute/scores.py first")
    with (
        damage_named(file, "delete it and start precompute/scores.py again"),
        np.load(file, allow_pickle=False) as arrays,
    ):
        found = arrays["embeddings"] if embeddings else np.empty((0, 0), np.float16)
        scores = ShardScores(json.loads(str(arrays["keys"])), found, arrays["similarities"])
        if len({len(scores.keys), *scores.similarities.shape, *([len(found)] if embeddings else [])}) > 1:
            raise ValueError("columns of different lengths")
        if not all(isinstance(key, str) for key in scores.keys) or scores.similarities.dtype.kind != "f":
            raise ValueError("keys that are no texts, or similarities that are no numbers")
    return scores


def read_facts(folder: Path) -> dict[str, Any]:
    """What the scores of a folder depend on, at least one fact; empty if there are no scores yet.

    Raises:
        ValueError: the file is damaged.
    """
    file = folder / FACTS
    if not file.is_file():
        return {}
    try:
        facts = read_object(file)
        if not facts:
            raise ValueError("it names no model")
    except ValueError as error:
        raise ValueError(f"{file}: damaged ({error}); delete {folder} and start precompute/scores.py again") from None
    return facts
