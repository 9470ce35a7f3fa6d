"""Captions of sources to a vocabulary on disk."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from data.bpe_training import train
from data.manifest import write_atomically
from data.sources.base import Rejected, Source
from data.sources.filters import Filter
from data.vocabulary_files import manifest_path, read_manifest
from precompute.config import VocabularyConfig
from precompute.work import summary
from recipes.config.build import build
from recipes.config.recipe import to_yaml

EVERY = 10.0  # seconds between lines of progress


class Captions:
    """The fit captions of sources, counted as they are read.

    Args:
        sources: by label.
        filter: judges captions; pictures are not decoded.
        limit: most captions; None: all. Shards are then read in an order drawn from the seed, so that the first
            captions are a sample of all.
        seed: of that order.
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
        printed = time.monotonic()
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
                if time.monotonic() - printed >= EVERY:
                    printed = time.monotonic()
                    print(f"vocabulary: {self.count:,} captions", flush=True)


def write_vocabulary(config: VocabularyConfig) -> None:
    """Trains the vocabulary and writes it with its manifest; does nothing where the same is there.

    Raises:
        FileNotFoundError: a source that is not there.
        ValueError: too few captions for so many entries, or a file that another job wrote.
    """
    out, request = Path(config.out), config.request()
    if manifest_path(out).is_file():
        made = read_manifest(out)
        whole = out.is_file() and hashlib.sha256(out.read_bytes()).hexdigest() == made["sha256"]
        if made.get("request") != json.loads(json.dumps(request)):
            raise ValueError(f"out: {out} was made with other options; give another `out`, or delete it to train again")
        if whole:
            print(f"already complete: {out}; delete it to train again")
            return
    elif out.exists():
        raise ValueError(f"out: {out} is there without its manifest; give another `out`, or delete it")
    captions = Captions(build(config.sources), build(config.filter), config.limit, config.seed)
    data = train(captions, config.entries).to_str(pretty=True).encode("utf-8")
    facts = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "entries": config.entries,
        "captions": captions.count,
        "rejected": dict(sorted(captions.rejected.items())),
        "request": request,
        "software": {"tokenizers": version("tokenizers")},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    # The vocabulary last: a manifest without it is no obstacle when the job is started again.
    write_atomically(manifest_path(out), json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    write_atomically(out, data)
    print(
        f"wrote {out}: {config.entries:,} entries from {captions.count:,} captions; "
        f"set aside: {summary(captions.rejected.items())}"
    )


def report(config: VocabularyConfig, missing: list[str]) -> str:
    """The resolved config and what would be read, as text."""
    lines = [to_yaml(config), *(f"missing: {path}" for path in missing)]
    build(config.filter)  # for its errors
    for label, component in config.sources.items():
        try:
            lines.append(f"{label}: {len(build(component).shards()):,} input shards")
        except (FileNotFoundError, ValueError) as error:
            lines.append(f"{label}: the source cannot be read yet: {error}")
    lines.append(f"into {config.out}: {config.entries:,} entries")
    return "\n".join(lines)
