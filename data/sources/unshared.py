"""A source without the images that another set has, too, by the list of `precompute/scores.py --shared`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from data.aliases import InputPath
from data.sources.base import Rejected, Sample
from data.system.files import read_object


class UnsharedSource:
    """The samples of another source whose images no other set has; the others are rejected as shared_image.

    Ramesh et al. (2021, section 3) compute FID also without the images of the reference that their training set has.
    """

    def __init__(self, *, source: Annotated[Any, "source"], shared: InputPath, at_least: float | None = None) -> None:
        """
        Args:
            source: the source whose images were looked for in the other set.
            shared: list of the images that were found, such as runs/mine/val/scores/shared.json.
            at_least: smallest cosine similarity of two images that count as the same; null: the threshold with which
                the list was made.

        Raises:
            FileNotFoundError: there is no such list.
            ValueError: the list is damaged, or has no images of a similarity as small as `at_least`.
        """
        self.source = source
        self.list = Path(shared)
        threshold, found, self.seen = read_shared(self.list)
        least = threshold if at_least is None else at_least
        if not threshold <= least <= 1:
            raise ValueError(
                f"source.at_least: {least}; give {threshold:g} to 1, because {self.list} was made with a threshold of "
                f"{threshold:g}"
            )
        self.shared = {place: similarity for place, similarity in found.items() if similarity >= least}

    def shards(self) -> list[str]:
        """The shards of the source.

        Raises:
            ValueError: the list is of other shards, or of fewer, as where files were added to the source since.
        """
        shards = self.source.shards()
        unseen = [] if self.seen is None else [shard for shard in shards if shard not in self.seen]
        if unseen and len(unseen) < len(shards):
            raise ValueError(
                f"source.shared: {self.list} was made without {len(unseen):,} of the source's {len(shards):,} shards, "
                f"such as {unseen[0]}; make it again with precompute/scores.py --shared"
            )
        listed = {shard for shard, _ in self.shared} if self.seen is None else self.seen
        if listed and listed.isdisjoint(shards):
            raise ValueError(
                f"source.shared: {self.list} is of other shards, such as {min(listed)}; give the list of this source, "
                "with the same paths or addresses"
            )
        return shards

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Samples of one shard, in stored order (see `base.Source.read`)."""
        for sample in self.source.read(shard):
            similarity = self.shared.get((shard, sample.key))
            if isinstance(sample, Sample) and similarity is not None:
                yield Rejected(sample.key, "shared_image", f"{similarity:.4f}")
            else:
                yield sample


def read_shared(file: Path) -> tuple[float, dict[tuple[str, str], float], set[str] | None]:
    """The threshold of a list of `precompute.scoring.duplicates`, the largest similarity of each image in it, and the
    shards that were looked through.

    Args:
        file: shared.json.

    Returns:
        The threshold, (shard, key) -> cosine similarity, and ids of shards; None: the list is of an earlier version,
        which did not write them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; make it with precompute/scores.py --shared")
    found: dict[tuple[str, str], float] = {}
    try:
        values = read_object(file)
        for pair in values["pairs"]:
            place = str(pair["image"]["shard"]), str(pair["image"]["key"])
            found[place] = max(float(pair["similarity"]), found.get(place, -math.inf))
        seen = values.get("shards")
        return float(values["threshold"]), found, None if seen is None else set(map(str, seen))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file}: damaged ({problem}); make it again with precompute/scores.py --shared") from None
