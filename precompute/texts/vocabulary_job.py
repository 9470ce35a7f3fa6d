"""Trains a vocabulary and writes it with its manifest."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.sources.base import Rejected, Source, samples_of, shards_of
from data.sources.filters import Filter, judged
from data.system.files import atomic_write, write_json
from data.system.log import log
from data.tokenizers.bpe_training import train
from data.tokenizers.vocabulary_files import manifest_path, read_manifest
from precompute.config import VocabularyConfig, changed_option
from precompute.output.totals import counts_text
from recipes.config.build import build

EVERY = 10.0  # seconds between lines of progress


def is_written(config: VocabularyConfig) -> bool:
    """Whether the job's vocabulary is there already, whole.

    Raises:
        ValueError: another job wrote the file.
    """
    out, request = Path(config.out), _request(config)
    if manifest_path(out).is_file():
        made = read_manifest(out)
        whole = out.is_file() and hashlib.sha256(out.read_bytes()).hexdigest() == made["sha256"]
        earlier = made.get("request") or {}
        if (name := changed_option(earlier, request)) is not None:
            raise ValueError(
                f"out: {out} was made with {name} {earlier.get(name)}, this job has {request.get(name)}; give another "
                "`out`, or delete it to train again"
            )
        return whole
    if out.exists():
        raise ValueError(f"out: {out} exists without its manifest; give another `out`, or delete it")
    return False


def write_vocabulary(config: VocabularyConfig) -> None:
    """Trains the vocabulary and writes it with its manifest. Does nothing where the same vocabulary is there already.

    Raises:
        FileNotFoundError: a source does not exist.
        ValueError: the texts give fewer entries than requested, or another job wrote the file.
    """
    out = Path(config.out)
    if is_written(config):
        log.info(f"already complete: {out}; delete it to train again")
        return
    captions = Captions(build(config.sources), build(config.filter), config.limit, config.seed)
    data = train(captions, config.entries).to_str(pretty=True).encode("utf-8")
    facts = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "entries": config.entries,
        "captions": captions.count,
        "rejected": dict(sorted(captions.rejected.items())),
        "request": _request(config),
        "software": {"tokenizers": version("tokenizers")},
    }
    # The vocabulary last: a job that was killed in between can be started again.
    write_json(manifest_path(out), facts, indent=1)
    with atomic_write(out) as partial:
        partial.write_bytes(data)
    log.info(
        f"wrote {out}: {config.entries:,} entries from {captions.count:,} texts; "
        f"rejected: {counts_text(captions.rejected.items())}"
    )


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
        shards = [(label, shard) for label, source in self.sources.items() for shard in shards_of(source)]
        if self.limit is not None:
            random.Random(self.seed).shuffle(shards)
        logged = time.monotonic()
        for label, shard in shards:
            for sample in samples_of(self.sources[label], shard):
                caption = sample if isinstance(sample, Rejected) else judged(self.filter, sample)
                if isinstance(caption, Rejected):
                    self.rejected[caption.reason] += 1
                    continue
                if self.count == self.limit:
                    return
                self.count += 1
                yield caption
                if time.monotonic() - logged >= EVERY:
                    logged = time.monotonic()
                    log.info(f"vocabulary: {self.count:,} texts")


def _request(config: VocabularyConfig) -> dict[str, Any]:
    """As it comes back from a file."""
    return json.loads(json.dumps(config.request()))
