"""A source without the pairs whose caption does not fit the image, by the scores of precompute/scores.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from data.aliases import InputPath
from data.score_files import read_scores, score_file
from data.sources.base import Rejected, Sample


class ScoredSource:
    """The samples of another source whose score is high enough; the others are rejected as low_similarity."""

    def __init__(self, *, source: Annotated[Any, "source"], scores: InputPath, at_least: float) -> None:
        """
        Args:
            source: the source that was scored.
            scores: folder of its scores, such as runs/mine/train/scores.
            at_least: smallest cosine similarity of an image and its caption. The scale of similarities depends on the
                model; the summary of the scores contains their quantiles.

        Raises:
            ValueError: a similarity that no pair can have.
        """
        if not -1 <= at_least <= 1:
            raise ValueError(f"source.at_least: {at_least}; give a cosine similarity from -1 to 1")
        self.source = source
        self.scores = Path(scores)
        self.at_least = at_least

    def shards(self) -> list[str]:
        """The shards of the source."""
        return self.source.shards()

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Samples of one shard, in stored order (see `base.Source.read`).

        Raises:
            FileNotFoundError: the shard has not been scored.
            ValueError: its scores are damaged, or those of other samples.
        """
        scores = read_scores(self.scores, shard, embeddings=False)
        similarities = dict(zip(scores.keys, scores.similarities.tolist(), strict=True))
        unknown = known = 0
        for sample in self.source.read(shard):
            known += sample.key in similarities
            unknown += isinstance(sample, Sample) and sample.key not in similarities
            if isinstance(sample, Rejected):
                yield sample
            elif sample.key not in similarities:
                yield Rejected(sample.key, "low_similarity", "not scored: the scores' filter rejected it")
            elif not (found := similarities[sample.key]) >= self.at_least:  # also where it is not a number
                yield Rejected(sample.key, "low_similarity", f"{found:.4f}")
            else:
                yield sample
        if unknown and similarities and not known:  # all would be left out
            file = score_file(self.scores, shard)
            raise ValueError(f"{file}: scores of other samples; delete it and start precompute/scores.py again")
