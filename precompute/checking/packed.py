"""Verifies sets of packed texts: all of their files, against the index and the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

import numpy as np

from data.encoded.mds_index import INDEX, read_index
from data.encoded.text_manifest import NAME, TextManifest
from data.system.files import write_json
from data.system.log import log
from data.tokenizers.vocabulary_files import VOCABULARY
from precompute.checking.file_figures import Column, ColumnFigures, print_faults
from precompute.checking.reading import figures_of_files

TOKENS = "tokens"  # the column


def verify_packed(folder: Path, out: Path, workers: int) -> bool:
    """Verifies a set of packed texts and prints a report.

    Args:
        folder: of the set.
        out: folder for the figures.
        workers: number of processes that read the files.

    Returns:
        Whether it holds.

    Raises:
        ValueError, FileNotFoundError: the set has no manifest or no index that can be read.
    """
    manifest = TextManifest.read(folder / NAME)
    entries = read_index(folder)
    columns = {TOKENS: Column((manifest.positions + 1,), np.dtype(np.uint16), True, manifest.vocabulary, False)}
    progress = out / f".{folder.name}.progress.json"
    total = figures_of_files(folder, entries, columns, workers, progress, ("key",), NAME)
    faults, tokens = total.faults, total.columns.get(TOKENS, ColumnFigures())
    if tokens.saturated:
        faults.append(f"column {TOKENS}: {tokens.saturated:,} are not below {manifest.vocabulary:,}, as {NAME} says")
    counted = sum(entry["samples"] for entry in entries)
    if counted != manifest.samples:
        faults.append(f"{folder / INDEX}: {counted:,} samples, {NAME} says {manifest.samples:,}")
    shards = len({PurePosixPath(entry["raw_data"]["basename"]).parent for entry in entries})
    if shards > manifest.shards:  # there are fewer where the texts of a shard fill no row
        faults.append(f"{folder / INDEX}: files of {shards:,} input shards, {NAME} says {manifest.shards:,}")
    faults += _vocabulary_faults(folder / VOCABULARY, manifest)
    values = {"samples": total.samples, "files": len(entries), "hashes": total.hashes, "used": len(tokens.seen)}
    file = out / f"{folder.name}.json"
    write_json(file, {"holds": not faults, "faults": faults, **values}, indent=1)
    progress.unlink(missing_ok=True)
    log.info(f"{folder}: {total.samples:,} rows in {len(entries):,} files, {total.hashes:,} hashes compared")
    log.info(f"  {TOKENS}: {len(tokens.seen):,} different ones of {manifest.vocabulary:,}")
    print_faults(faults, file)
    return not faults


def _vocabulary_faults(path: Path, manifest: TextManifest) -> list[str]:
    if not path.is_file():
        return [f"{path}: missing; exports of runs that read the set would have no vocabulary"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.vocabulary_hash:
        return [f"{path}: its sha256 is not the one in {NAME}; the texts were packed with another vocabulary"]
    return []
