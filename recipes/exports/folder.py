"""The folder of an export: weights in formats that other programs open, and what generation from them needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from data.encoded.manifest import NULL_TEXT, Manifest
from data.loading import Loading
from data.system.files import atomic_folder, write_json
from recipes.exports.encoder_files import ENCODERS, encoder_files
from recipes.models.task import Task


def export(
    task: Task,
    loading: Loading,
    folder: Path,
    record: dict[str, Any],
    complete: bool,
    average: Callable[[], AbstractContextManager] | None = None,
) -> None:
    """Write a task's weights, and beside them what generation from them needs.

    Args:
        task: its `exports_average_beside` decides whether both kinds of weights are written into one folder.
        loading: its training data; the manifest of an encoded set, its null caption or vocabulary, and encoders that
            are local files are copied too.
        folder: an old export in it is replaced when the new one is complete. Its copies of the same encoders are
            taken over, because another training may have replaced the files by now that encoded the set.
        record: the contents of export.json and done.json.
        complete: whether the run has ended; only then is there a done.json, by which `make quickstart` skips a stage.
        average: makes a context in which the task has its averaged weights; None: there are none.
    """
    with export_folder(task, loading, folder, record, complete, bundle_of(loading.manifest, folder)) as new:
        if average is not None and task.exports_average_beside:
            task.export(new)
            with average():
                task.export_average(new)
        else:
            with nullcontext() if average is None else average():
                task.export(new)


@contextmanager
def export_folder(
    task: Task, loading: Loading, folder: Path, record: dict[str, Any], complete: bool, bundle: Path | None
) -> Iterator[Path]:
    """A context with a new folder for the weights of an export, which gets everything else and its name at the end.

    Arguments as of `export`, and `bundle`: folder whose copies of the encoders are taken, as far as it has them; None:
    the encoders are copied from where they encoded the set.
    """
    with atomic_folder(folder) as new:
        yield new
        record = {**record, **task.export_record()}
        if loading.vocabulary is not None:
            loading.vocabulary.copy(new)
        if loading.manifest is not None:
            loading.manifest.write(new)
            if loading.null_text is not None:
                np.save(new / NULL_TEXT, loading.null_text.numpy())
            record = {**record, "resolution": loading.resolution}
            if loading.images is not None:
                record["images"] = loading.images
            for file, place in encoder_files(loading.manifest, bundle):
                (new / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, new / place)
        for name in ("export.json", "done.json") if complete else ("export.json",):
            write_json(new / name, record, indent=2)


def bundle_of(manifest: Manifest | None, folder: Path) -> Path | None:
    """The folder if it has an export of a set with the same encoders, of which it may have copies; otherwise None."""
    try:
        earlier = None if manifest is None else Manifest.read(folder)
    except (OSError, ValueError):  # no export, or a damaged one
        return None
    same = earlier is not None and all(getattr(earlier, name) == getattr(manifest, name) for name in ENCODERS)
    return folder if same else None
