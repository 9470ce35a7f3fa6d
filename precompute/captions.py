"""Reads the captions of sources."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

from data.log import log
from data.sources.base import Rejected, Source
from data.sources.filters import Filter

EVERY = 10.0  # seconds between lines of progress


class Captions:
    """The captions that pass a filter, and how many do not. Images are not decoded.

    Args:
        sources: sources by label.
        filter: judges captions.
        limit: maximum number of captions; None for all. With a limit, shards are read in random order, so that the
            first captions are a sample of all of them.
        seed: seed of that order.

    Attributes:
        count: captions read so far.
        rejected: captions that did not pass, by reason.
    """

    def __init__(self, sources: dict[str, Source], filter: Filter, limit: int | None, seed: int) -> None:
        self.sources = sources
        self.filter = filter
        self.limit = limit
        self.seed = seed
        self.count = 0
        self.rejected: Counter[str] = Counter()

    def __iter__(self) -> Iterator[str]:
        shards = [(label, shard) for label, source in self.sources.items() for shard in source.shards()]
        if self.limit is not None:
            random.Random(self.seed).shuffle(shards)
        logged = time.monotonic()
        for label, shard in shards:
            for sample in self.sources[label].read(shard):
                caption = sample if isinstance(sample, Rejected) else self.filter.caption(sample)
                if isinstance(caption, Rejected):
                    self.rejected[caption.reason] += 1
                    continue
                if self.count == self.limit:
                    return
                self.count += 1
                yield caption
                if time.monotonic() - logged >= EVERY:
                    logged = time.monotonic()
                    log.info(f"vocabulary: {self.count:,} captions")
