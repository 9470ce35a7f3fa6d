"""An evaluation from its config to its report."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import NULL_TEXT
from data.own_gpu import check_own_gpu
from data.sources.base import Sample
from data.system.log import log
from data.system.ranks import Rank
from data.system.threads import all_cores
from data.tokenizers.vocabulary_files import VOCABULARY
from recipes.config.build import build
from recipes.config.values import plain_values
from recipes.evaluation.config import Evaluation
from recipes.evaluation.job import Job, resolution_of
from recipes.evaluation.report import write_report
from recipes.evaluation.variants import Variant, variants
from recipes.generation.exports import find_export, find_network, load_pipeline, read_record, weights_of
from recipes.models.latent_diffusion.task import SCHEDULER
from recipes.scoring.extractors import build_extractor
from recipes.scoring.figures import Settings, check_counts, figures
from recipes.scoring.reference import RESIZE, captions_of, content, read_reference, reference_features
from recipes.scoring.reranking import Reranker

# Files of an export that images depend on besides the network, as far as its family has them. The manifest holds hashes
# of the encoders' weights, with which they are compared when the pipeline is loaded.
READ = (MANIFEST, SCHEDULER, NULL_TEXT, VOCABULARY)


def evaluate(export: Path, config: Evaluation) -> dict[str, Any] | None:
    """Evaluate an export. Every rank calls it; the first one returns the report and writes it.

    Raises:
        FileNotFoundError: a part of the export, the reference or a network is missing.
        ValueError: fewer pictures than a metric needs.
    """
    rank = Rank.from_environment()
    folder = find_export(export)
    source, first = build(config.reference.source), rank.rank == 0
    samples = read_reference(source, config.reference.images, config.seed, pictures=first)
    captions = captions_of(samples, config.images, config.seed)
    check_counts(settings_of(config), len(captions), len(samples))
    if torch.cuda.is_available() and config.device != "cpu":
        check_own_gpu("device")
        torch.cuda.set_device(rank.local)
    pipeline = load_pipeline(folder, config.device, config.precision, config.weights)
    extractor = build_extractor(config.extractor.kind, config.extractor.path, pipeline.device)
    network = find_network(folder, config.weights)
    clip = Reranker(config.clip, pipeline.device, "clip") if "clip_score" in config.metrics else None
    reranker = None if config.rerank is None else Reranker(config.rerank.by, pipeline.device, "rerank.by")
    if reranker is not None and clip is not None and reranker.hash() == clip.hash():  # as retrieval refuses it
        log.warning(
            f"rerank.by: {config.rerank.by} is also the model of clip_score, which then grows with the pool whether "
            "images are better or not; give another one"
        )
    identity = {
        "network": digest(network),
        **{name: digest(folder / name) for name in READ if (folder / name).exists()},
        "record": {name: value for name, value in read_record(folder).items() if name in ("objective", "resolution")},
        "extractor": extractor.hash,
        "clip": None if clip is None else clip.hash(),
        "rerank": None if reranker is None else reranker.hash(),
        "precision": config.precision,
    }
    job = Job(config, captions, pipeline, extractor, clip, reranker, identity, Path(config.out, "work"))
    resolution = resolution_of(config.sampling, pipeline)
    references = references_of(job, samples) if first else {}
    if first:  # before images are drawn, which may take hours: pictures that do not decode are missing
        check_counts(settings_of(config), len(captions), len(references[resolution][0]))
    job.run(rank)
    if not first:
        return None
    with all_cores():  # on one thread, which torchrun gives a rank, precision and recall of 30,000 images take minutes
        rows = [
            row
            for variant in variants(config)
            for row in rows_of(job, variant, references[resolution_of(variant.options, pipeline)])
        ]
    result = {
        "export": str(folder),
        "weights": f"{network.name}, {weights_of(folder, network)}, sha256 {identity['network']}",
        "images": len(captions),
        "seeds": f"{config.seed} to {config.seed + len(captions) - 1}",
        "reference": f"{len(references[resolution][0])} pictures of {_one_line(config.reference.source)}",
        "reference content": content(samples),
        "resolution": resolution,
        "resize of the reference": RESIZE,
        "extractor": extractor.name,
        "extractor hash": extractor.hash,
        "resize of the extractor": extractor.resize,
        "sampling": config.sampling or "the family's defaults",
        "precision": config.precision,
        "contrastive model of clip_score": "none" if clip is None else f"{config.clip}, sha256 {identity['clip']}",
        **({} if reranker is None else _reranked(config, len(captions), identity["rerank"])),
        "rows": rows,
    }
    write_report(result, Path(config.out))
    log.info(f"report: {config.out}/report.md")
    return result


def _reranked(config: Evaluation, captions: int, judge: str) -> dict[str, str]:
    """What the report says of pools: candidate k of image i has the seed of image i + k * captions."""
    pool = max(config.rerank.pools)
    last = config.seed + pool * captions - 1
    return {
        "reranked by": f"{config.rerank.by}, sha256 {judge}",
        "candidates": f"up to {pool} per caption, with the seeds {config.seed} to {last}",
    }


def references_of(job: Job, samples: list[Sample]) -> dict[int, dict[int, Any]]:
    """Features of the reference by resolution and radius: it gets the size of the images, which a sweep may change."""
    radii: dict[int, set[int]] = {}
    for variant in variants(job.config):
        radii.setdefault(resolution_of(variant.options, job.pipeline), set()).update(variant.radii)
    folder = Path(job.config.out, "reference")
    return {side: reference_features(samples, side, sorted(of), job.extractor, folder) for side, of in radii.items()}


def rows_of(job: Job, variant: Variant, reference: dict[int, Any]) -> list[dict[str, Any]]:
    """One row of the table per radius or size of the pool of a variant."""
    rows = []
    for label, arrays in job.collect(variant).items():
        if variant.pools:
            varied, against = {"pool": label}, reference[0]
        elif variant.name == "sampling":
            varied, against = {"blur": label}, reference[label]
        else:
            option = variant.name.partition("=")[0]
            varied, against = {option: variant.options.get(option)}, reference[0]  # null is not among them
        text = ", ".join(f"{name} {value}" for name, value in varied.items())
        rows.append({"label": text, "varied": varied, "figures": figures(settings_of(job.config), arrays, against)})
    return rows


def settings_of(config: Evaluation) -> Settings:
    """The settings of the figures that a config asks for."""
    return Settings(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Settings)})


def digest(path: Path) -> str:
    """sha256 of a file, or of a folder's files and their names, in sixteen letters."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    total = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            total.update(f"{file.name}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]


def _one_line(source: Any) -> str:
    values = plain_values(source)
    return f"{values.pop('name')} {values}"
