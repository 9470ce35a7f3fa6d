"""What a run's folder says about the run: its recipe, and what encoded its data. A run that goes on must fit both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.files import write_json, write_text
from data.loading import Loading
from data.log import log
from data.manifest import Manifest
from recipes.config.differences import Difference, differences
from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.config.values import ConfigError, quoted
from recipes.planning.opening import CONFIG
from recipes.training.clock import parse_duration
from recipes.training.newest import has_checkpoints

ENCODED = "encoded.json"
RECORD = (CONFIG, ENCODED)  # files in the folder of a run
# What may change in a run: nothing that it learns depends on it.
FREE = (
    "run_name",
    "output",
    "evals",
    "checkpoints",
    "callbacks",
    "loggers",
    "training.engine",
    "training.device",
    "training.microbatch",
    "training.fsdp",
    "training.tensor_parallel",
    "training.tensor_between_machines",
    "training.sequence_parallel",
    "training.eval_every",
    "training.nonfinite_limit",
    "training.watchdog",
    "training.watchdog_ends",
    "training.progress_bar",
)
# Keys of data and its streams: how samples come here, and not which.
FREE_OF_DATA = (
    "workers",
    "predownload",
    "cache_limit",
    "cache",
    "keep_zip",
    "validate_hash",
    "download_retry",
    "download_timeout",
)
ACTS_ON_TRAINING = ("scheduled_value",)  # callbacks that do


def check_record(recipe: Recipe) -> list[str]:
    """The keys that have changed since the run was begun, all of which may; empty if it begins.

    Raises:
        ValueError: the run goes on, and a key has changed that may not.
    """
    record = Path(recipe.output, CONFIG)
    if not (recipe.checkpoints.resumes and has_checkpoints(Path(recipe.output)) and record.is_file()):
        return []
    try:
        before = load_config(record, [], Recipe, missing=[])
    except ConfigError as error:
        log.warning(f"{record}: not a recipe of this version ({error.lines[0]}); the run goes on without a comparison")
        return []
    changes = list(changes_of(before, recipe))
    refused = [change for change in changes if not _is_allowed(change, recipe.checkpoints.allow_changes)]
    if refused:
        listed = "; ".join(f"{key} was {quoted(old)}, is {quoted(new)}" for key, old, new in refused)
        keys = ", ".join(key for key, _, _ in refused)
        raise ValueError(
            f"checkpoints.autoresume: the recipe is not the one that {recipe.output} was begun with: {listed}; give "
            f"another output, or go on with checkpoints.allow_changes=[{keys}]"
        )
    return [key for key, _, _ in changes]


def _is_allowed(change: Difference, allowed: list[str]) -> bool:
    key, old, new = change
    if key == "training.duration":
        (before, unit), (now, other) = parse_duration(old), parse_duration(new)
        if unit == other and now >= before:
            return True
    return _is_below(key, allowed)


def _is_below(key: str, keys: tuple[str, ...] | list[str]) -> bool:
    return any(key == above or key.startswith(above + ".") for above in keys)


def changes_of(before: Recipe, now: Recipe) -> Iterator[Difference]:
    """The keys on which what a run learns depends, and whose values differ. Defaults count as given."""
    for key, old, new in differences(before, now):
        section, _, name = key.rpartition(".")
        of_data = section.startswith("data") and name in FREE_OF_DATA
        acts = key.startswith("callbacks.") and any(_acts_on_training(recipe, key) for recipe in (before, now))
        if acts or not (_is_below(key, FREE) or of_data):
            yield key, old, new


def _acts_on_training(recipe: Recipe, key: str) -> bool:
    callback = recipe.callbacks.get(key.split(".")[1])
    return callback is not None and callback.name in ACTS_ON_TRAINING


def keep_record(recipe: Recipe, data: Loading) -> None:
    """Write the recipe and what encoded the data into the run's folder. Another recipe that is there is kept.

    Only the first rank calls this, and only for a run that begins or may go on.
    """
    output = Path(recipe.output)
    record, text = output / CONFIG, to_yaml(recipe)
    if record.is_file() and record.read_text(encoding="utf-8") != text and has_checkpoints(output):
        number = 1 + sum(1 for _ in output.glob("config-*.yaml"))
        # A copy, not a rename: if the disk is full now, the next start still finds what the run was.
        write_text(output / f"config-{number}.yaml", record.read_text(encoding="utf-8"))
    write_text(record, text)
    if data.manifest is not None:
        write_json(output / ENCODED, encoders(data.manifest), indent=1)


def encoders(manifest: Manifest) -> dict[str, Any]:
    """What says that two encoded sets are of the same kind, as `Manifest.check` takes it."""
    images, texts = manifest.image_encoder, manifest.text_encoder
    found = {"image_weights": images["weights_hash"]}
    found |= {name: images[name] for name in ("scaling_factor", "shift_factor") if name in images}
    if texts is not None:
        found |= {"text_weights": texts["weights_hash"], "tokenizer": texts["tokenizer"]}
    return {"kind": manifest.kind, **found}


def check_encoders(recipe: Recipe, data: Loading, evals: Mapping[str, Loading]) -> None:
    """Compare what encoded the training data with the validation sets, and with the run that goes on.

    Raises:
        ValueError: a set was encoded by others.
    """
    if data.manifest is None:
        return
    for label, loading in evals.items():
        if loading.manifest is not None:
            _compare(loading.manifest, encoders(data.manifest), f"evals.{label}: not encoded as the training data is")
    if "data" in recipe.checkpoints.allow_changes:
        return
    runs = []
    if recipe.checkpoints.resumes and has_checkpoints(Path(recipe.output)):
        runs.append(Path(recipe.output))
    elif recipe.checkpoints.load_path and "://" not in recipe.checkpoints.load_path:
        runs.append(Path(recipe.checkpoints.load_path).resolve().parent.parent)
    for run in runs:
        if (run / ENCODED).is_file():
            values = json.loads((run / ENCODED).read_text(encoding="utf-8"))
            _compare(data.manifest, values, f"data: not encoded as that of {run}, whose checkpoint is loaded")


def _compare(manifest: Manifest, expected: dict[str, Any], what: str) -> None:
    try:
        manifest.check(**expected)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
