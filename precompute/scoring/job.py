"""Scores of the pairs of a job's sources, shard by shard, by any number of ranks that share nothing but the folder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data.score_files import FACTS, FOLDER, SUMMARY, ShardScores, read_facts, read_scores, score_file, write_scores
from data.sources.base import DecodedSample, Sample, Source, shards_of
from data.sources.filters import Filter, decoded
from data.system.errors import WrongResult, together
from data.system.files import atomic_write, write_json
from data.system.log import every_rank
from data.system.ranks import Rank
from data.system.side_by_side import side_by_side
from data.transforms import resize_and_crop
from precompute.config import EncodeConfig, changed_option, filter_version, source_options
from precompute.encoding.job import pick_device
from precompute.output.claims import shards_to_do
from precompute.output.output_set import OutputSet
from precompute.output.problems import Problem
from precompute.output.unreadable import Unreadable, could_not_be_read, not_done, read_samples
from recipes.config.build import build
from recipes.config.values import plain_values
from recipes.scoring.reranking import Reranker

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
DECODERS = 8  # threads that decode images


def score(config: EncodeConfig, model: str) -> bool:
    """Score this rank's shards that are not done yet, then those that no other has begun. Write the summary of every
    set of which all shards are done.

    Args:
        config: of the encode job.
        model: the contrastive model, see `Reranker`.

    Returns:
        Whether all sets are complete.

    Raises:
        FileNotFoundError, ValueError: the model cannot be loaded, a folder holds scores of another model, or input
            shards could not be read, and no other is left; or no pair of a set passed the filter. The other sets are
            complete all the same.
    """
    rank = Rank.from_environment()
    sources, decoder = build(config.sources), build(config.filter)
    scorer = Reranker(model, str(pick_device(config.device, rank.local)), "--model")
    judged = {"filter": plain_values(config.filter)} | filter_version(config.filter)
    of_all = {"model": model, "weights_hash": scorer.hash()} | judged
    facts = {label: of_all | source_options(component) for label, component in config.sources.items()}
    folders = {label: Path(config.out, label, FOLDER) for label in sources}
    together(partial(claim, folder, facts[label]) for label, folder in folders.items())
    sets = {label: ScoreSet(folders[label], shards_of(source)) for label, source in sources.items()}
    shards = [(label, shard) for label, output in sets.items() for shard in output.shards]
    own = rank.share(shards)
    todo = [one for one in own if not score_file(folders[one[0]], one[1]).is_file()]
    every_rank.info(f"scores: rank {rank.rank} of {rank.world}: {len(todo)} of {len(shards)} shards to do, {model}")
    with ThreadPoolExecutor(DECODERS) as pool:
        for label, shard, keep in shards_to_do(sets, rank):
            try:
                scores = score_shard(sources[label], shard, decoder, scorer, config.batch, pool, keep)
            except Unreadable as error:
                every_rank.warning(f"scores: {shard} could not be read: {error}")
                sets[label].note_unreadable(shard, error.problem)
                continue
            write_scores(score_file(folders[label], shard), scores)
    unreadable: dict[str, Problem] = {}
    left = [_summarise(output, facts[label], unreadable) for label, output in sets.items()]
    if unreadable and not any(left):
        raise could_not_be_read(unreadable, ", or take them out of the source")
    if any(left):
        return False
    empty = [str(folder) for folder in folders.values() if not (folder / SUMMARY).is_file()]
    if empty:
        raise ValueError(f"{', '.join(empty)}: no pair passed the filter; see the source and its filter")
    return True


class ScoreSet(OutputSet):
    """The scores of a set: a file for each shard, in place of a folder."""

    def is_encoded(self, shard: str) -> bool:
        """See `OutputSet`."""
        return score_file(self.out, shard).is_file()

    def absent(self) -> list[str]:
        """See `OutputSet`."""
        present = {path.name for path in self.out.glob("shards/*.npz")}  # one listing, as there
        return [shard for shard in self.shards if score_file(self.out, shard).name not in present]


def claim(folder: Path, facts: dict[str, Any]) -> None:
    """Write down what the scores in a folder depend on, or compare it with what is there.

    Raises:
        ValueError: the folder holds scores that depend on something else.
    """
    found = read_facts(folder)
    name = changed_option(found, facts) if found else None
    if name is not None:
        raise ValueError(
            f"{folder}: holds scores by {name} {found.get(name)}, this job has {facts.get(name)}; delete the folder to "
            "score again, or give another `out`"
        )
    write_json(folder / FACTS, facts, indent=1)


def score_shard(
    source: Source,
    shard: str,
    decoder: Filter,
    scorer: Reranker,
    batch: int,
    pool: ThreadPoolExecutor,
    keep: Callable[[], None],
) -> ShardScores:
    """The scores of the samples of a shard that pass the filter. Images are central squares, resized to the model's.

    The threads of the pool decode a batch while the model works on the one before. `keep` is called for each batch.

    Raises:
        Unreadable: the reading of the shard breaks off.
        WrongResult: two samples of it have the same key.
    """
    side = max(scorer.size)

    def decode(sample: Sample) -> tuple[str, str, np.ndarray] | None:
        found = decoded(decoder, sample, side)
        if not isinstance(found, DecodedSample):
            return None
        # By the key in the source: there the sources `scored` and `unshared` look for it, and a filter may change it.
        return sample.key, found.caption, resize_and_crop(found.image, side)

    keys: list[str] = []
    once: set[str] = set()
    embeddings, similarities = [np.empty((0, 0), np.float16)], [np.empty(0, np.float32)]
    samples = (sample for sample in read_samples(source, shard) if isinstance(sample, Sample))
    decoding = [pool.submit(decode, sample) for sample in islice(samples, batch)]
    while decoding:
        pairs = [pair for future in decoding if (pair := future.result()) is not None]
        decoding = [pool.submit(decode, sample) for sample in islice(samples, batch)]
        keep()
        if not pairs:
            continue
        found, captions, images = zip(*pairs, strict=True)
        seen = scorer.embed_images(np.stack(images), batch)
        for key in found:
            if key in once:
                raise WrongResult(
                    f"the source yields the key {key!r:.80} twice in the shard {shard}; yield each key once "
                    "(data.sources.base.ReadOnce): scores belong to keys"
                )
            once.add(key)
        keys += found
        embeddings.append(seen.astype(np.float16))
        similarities.append((seen * scorer.embed_captions(list(captions), batch)).sum(1))
    return ShardScores(keys, np.concatenate(embeddings[1:] or embeddings), np.concatenate(similarities))


def _summarise(output: OutputSet, facts: dict[str, Any], unreadable: dict[str, Problem]) -> int:
    """Write the figures of a set's similarities, and the share of pairs above each threshold as a chart.

    Nothing is written without any pair, nor where shards are missing. Of those, `unreadable` gets the ones that could
    not be read, each with the problem. Returns the number of the others, which are left to other ranks.
    """
    folder, shards = output.out, output.shards
    missing, broken = not_done(output)
    unreadable |= broken
    if left := missing - len(broken):
        every_rank.info(f"{folder}: {left} of {len(shards)} shards are left to other ranks")
    if missing:
        return left
    scores = side_by_side(lambda shard: read_scores(folder, shard, embeddings=False), shards)
    values = np.concatenate([one.similarities for one in scores])
    if not len(values):
        (folder / SUMMARY).unlink(missing_ok=True)  # of a source that had others
        return 0
    found = np.quantile(values, QUANTILES).tolist()  # at once: each call sorts a copy of them all
    quantiles = {f"{share:g}": round(value, 5) for share, value in zip(QUANTILES, found, strict=True)}
    figures = {"pairs": len(values), "mean": round(float(values.mean(dtype=np.float64)), 6), "quantiles": quantiles}
    output.forget_unreadable(output.shards)  # of ranks that could not read what others could
    output.remove_stale()
    write_json(folder / SUMMARY, {**facts, **figures}, indent=1)
    _chart(values, folder / "similarities.png")
    every_rank.info(f"{folder}: {len(values):,} pairs, mean similarity {figures['mean']:.4f}")
    return 0


def _chart(values: np.ndarray, file: Path) -> None:
    """The share of pairs whose similarity is at least the one on the horizontal axis."""
    from matplotlib.figure import Figure

    shares = np.linspace(0, 1, 501)
    figure = Figure(figsize=(4.5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.quantile(values, 1 - shares), shares)
    axes.set_xlabel("cosine similarity of image and caption")
    axes.set_ylabel("share of pairs at or above it")
    with atomic_write(file) as partial:
        figure.savefig(partial, format="png", dpi=120)
