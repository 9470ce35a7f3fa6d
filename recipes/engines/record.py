"""What a run's folder says about the run: its recipe, and what encoded its data. A run that goes on must fit both.

The record of the last start is in the folder itself. Each checkpoint has a copy of the record with which it was
written, so that a start that was killed before its first checkpoint leaves no trace in what later ones compare with.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import Manifest
from data.encoded.sets import warn_of_other_arguments
from data.loading import Loading
from data.system.disk_errors import ADVICE, may_pass
from data.system.errors import Outage
from data.system.files import atomic_folder, read_object, write_json, write_text
from data.system.log import log
from data.tokenizers.vocabulary_files import VOCABULARY as COPY
from data.tokenizers.vocabulary_files import VocabularyFile
from recipes.config.build import build_on_meta, import_builder
from recipes.config.differences import Difference, components_in, defaults_of, differences
from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.config.values import ConfigError, quoted
from recipes.engines.first_weights import whole_of
from recipes.planning.run_summary import CONFIG
from recipes.training.checkpoint_names import NAME, has_checkpoints, newest_of_all
from recipes.training.clock import parse_duration
from recipes.training.ranks import world_size

ENCODED = "encoded.json"
VOCABULARY = "vocabulary"  # its key there
SAMPLES = "samples"  # per epoch
COMPARED = "compared"  # samples that the loss compares with each other, of a model that does so
TRACKED = "tracked.txt"  # what loggers know the run by, see `recipes.engines.logs.tracking`
DEFAULTS = "defaults.json"  # of the components of other packages, by their paths in the recipe
RECORD = (CONFIG, ENCODED, TRACKED, DEFAULTS)  # files in the folder of a run
RECORDS = "records"  # folder of the copies, by checkpoints
# What may change in a run: nothing that it learns depends on it, but for the microbatch of models that compare samples.
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
    "training.fsdp.strategy",
    "training.fsdp.wrap",
    "training.fsdp.replicas",
    "training.fsdp.sync",
    "training.fsdp.checkpoints",
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
    """The keys that have changed since the newest checkpoint was written, all of which may; empty if there is none.

    Args:
        recipe: of a run that resumes.

    Raises:
        ValueError: the run goes on, and a key has changed that may not, or the recipe there cannot be read.
    """
    output = Path(recipe.output)
    record = record_of(recipe) / CONFIG
    if not has_checkpoints(output):
        return []
    if not record.is_file():
        if record.parent != output:  # else only the checkpoints were copied
            log.warning(f"{record}: is not there; whether its checkpoint is one of this recipe is not known")
        return []
    refusal = f"checkpoints.autoresume: the recipe is not the one that {output}"
    return _compare_recipes(record, recipe, refusal, "output")


def check_copy(recipe: Recipe, texts: dict[str, str]) -> None:
    """Compare a recipe with the record in `checkpoints.bucket`, texts by names of files.

    Earlier versions had it in an object of its own, which may be that of a start that saved nothing. It is not read: a
    line says that nothing is compared.

    Raises:
        ValueError: a key has changed that may not: the checkpoints there are another run's.
    """
    address = recipe.checkpoints.bucket
    if CONFIG not in texts:
        log.warning(
            f"checkpoints.bucket: {address}/latest.json has no recipe, as earlier versions wrote it; whether its "
            "checkpoints are this run's is not known"
        )
        return
    with TemporaryDirectory() as folder:
        record = Path(folder, CONFIG)
        for name in {CONFIG, DEFAULTS} & texts.keys():
            Path(folder, name).write_text(texts[name], encoding="utf-8")
        _compare_recipes(record, recipe, f"checkpoints.bucket: the recipe is not the one that {address}", "address")


def _compare_recipes(record: Path, recipe: Recipe, refusal: str, other: str) -> list[str]:
    """The keys that have changed. `refusal` begins the message, which asks for another `other`."""
    try:
        # Keys that may have changed were not checked by earlier versions, and say nothing of the run.
        before = load_config(record, ["checkpoints.allow_changes=[]"], Recipe, missing=[])
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # the recipe there may be of this version, and another
            raise
        log.warning(f"{record}: not a recipe of this version ({error.lines[0]}); the run goes on without a comparison")
        return []
    _give_defaults(before, record.with_name(DEFAULTS))
    changes = list(changes_of(before, recipe))
    refused = [change for change in changes if not _is_allowed(change, recipe.checkpoints.allow_changes)]
    if refused:
        listed = "; ".join(f"{key} was {quoted(old)}, is {quoted(new)}" for key, old, new in refused)
        # A list on the command line replaces that of the YAML; brackets and spaces mean something to a shell.
        keys = ", ".join([*recipe.checkpoints.allow_changes, *(key for key, _, _ in refused)])
        argument = shlex.quote(f"checkpoints.allow_changes=[{keys}]")
        raise ValueError(f"{refusal} was begun with: {listed}; give another {other}, or go on with {argument}")
    return [key for key, _, _ in changes]


def _give_defaults(before: Recipe, file: Path) -> None:
    """Give the components of other packages in a recipe the defaults that they had when its record was written.

    Those that have changed since are then changes as others. A key that has come or gone is none: nobody can tell
    whether the component does the same without it.
    """
    kept = _kept(file)
    for component in components_in(before):
        name, then = kept.get(component.path, (None, {}))
        if name == component.name:
            given = {key: value for key, value in then.items() if key in defaults_of(component)}
            component.args.update(given | component.args)


def record_of(recipe: Recipe) -> Path:
    """The folder with the record of the checkpoint that a run goes on from."""
    output = Path(recipe.output)
    newest = newest_of_all(output / "checkpoints")
    return output if newest is None else record_with(output, newest, output)


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
        acts |= key == "training.microbatch" and _compares_samples(now)
        same = key.startswith("training.fsdp") and _gathered(before) & _gathered(now)
        if acts or not (_is_below(key, FREE) or of_data or same):
            yield key, old, new


def _gathered(recipe: Recipe) -> set[str]:
    """The number formats that `training.fsdp` may give gathered parameters without a change of what a run computes. DDP
    leaves parameters in fp32, and autocast makes of them what `auto` does."""
    fsdp, precision = recipe.training.fsdp, recipe.training.precision
    auto = {"fp32": "fp32", "amp_bf16": "bf16"}.get(precision, "auto")
    if fsdp is None:
        return {"fp32", auto}
    return {auto if fsdp.parameters == "auto" else fsdp.parameters}


def _compares_samples(recipe: Recipe) -> bool:
    """Whether the size of a microbatch is part of what the model learns, see `Task.compares_samples`."""
    builder = import_builder(recipe.model)
    task = builder if isinstance(builder, type) else build_on_meta(recipe.model)  # a function says nothing of its task
    return getattr(task, "compares_samples", False)


def _compared(recipe: Recipe) -> int | None:
    """How many samples the loss compares with each other, on as many devices as there are; None: it compares none."""
    if not _compares_samples(recipe):
        return None
    batch, size = recipe.training.device_batch(world_size()), recipe.training.microbatch
    return min(batch, size) if isinstance(size, int) else batch


def _acts_on_training(recipe: Recipe, key: str) -> bool:
    callback = recipe.callbacks.get(key.split(".")[1])
    return callback is not None and callback.name in ACTS_ON_TRAINING


def keep_record(recipe: Recipe, data: Loading) -> None:
    """Write the recipe and what encoded the data into the run's folder. Another recipe that is there is kept.

    Only the first rank calls this, and only for a run that begins or may go on.
    """
    output = Path(recipe.output)
    record, text = output / CONFIG, to_yaml(recipe)
    if record.is_file() and (before := record.read_text("utf-8", "replace")) != text and has_checkpoints(output):
        kept = next(path for number in count(1) if not (path := output / f"config-{number}.yaml").exists())
        # A copy, not a rename: if the disk is full now, the next start still finds what the run was.
        write_text(kept, before)
    write_text(record, text)
    own = [component for component in components_in(recipe) if "." in component.name]
    if own or (output / DEFAULTS).exists():
        write_json(output / DEFAULTS, {one.path: [one.name, defaults_of(one)] for one in own}, indent=1)
    compared = _compared(recipe)
    if encoded := _encoded(data) | ({} if compared is None else {COMPARED: compared}):
        write_json(output / ENCODED, encoded, indent=1)


def _encoded(data: Loading) -> dict[str, Any]:
    """What encoded the training data, and the captions or texts of each batch: sha256 of the vocabulary's file. And how
    many samples an epoch has."""
    found = {} if data.manifest is None else data.manifest.encoders()
    if data.samples is not None:
        found[SAMPLES] = data.samples
    if data.vocabulary is not None:
        found[VOCABULARY] = data.vocabulary.sha256
    return found


def keep_with(output: Path, checkpoint: Path, anew: bool = True) -> None:
    """Copy the record in a run's folder for a checkpoint. Only the first rank calls this.

    Args:
        output: folder of the run.
        checkpoint: before anything names it the newest.
        anew: also where it has a copy; otherwise it is of an earlier version, which made none.
    """
    if anew or not record_with(output, checkpoint).is_dir():
        found = [output / name for name in RECORD if (output / name).is_file()]
        keep_texts(output, checkpoint, {file.name: file.read_text("utf-8", "replace") for file in found})


def keep_texts(output: Path, checkpoint: Path, texts: dict[str, str]) -> None:
    """Write the record of a checkpoint: texts by names of files."""
    if not texts:
        return
    record = record_with(output, checkpoint)
    try:
        with atomic_folder(record) as folder:
            for name, text in texts.items():
                write_text(folder / name, text)
    except OSError as error:
        advice = ADVICE.get(error.errno, "look at the disk and its mount")
        raise (Outage if may_pass(error) else ValueError)(
            f"checkpoints: {record} could not be written ({error.strerror}); {advice} and start again, it goes on "
            "from the checkpoint before"
        ) from error


def record_with(output: Path, checkpoint: Path, default: Path | None = None) -> Path:
    """The folder with the record of a checkpoint, or `default` where there is none."""
    name = NAME.match(checkpoint.name)
    folder = output / RECORDS / (checkpoint.name if name is None else name[0])
    return folder if default is None or folder.is_dir() else default


def check_encoders(recipe: Recipe, data: Loading, evals: Mapping[str, Loading]) -> None:
    """Compare what encoded the training data with the validation sets, and with the run that goes on. A set that has
    grown or shrunk since is only warned of, because that may be meant, and so are other encoders than those of the
    export whose weights a new run begins with.

    Raises:
        ValueError: a set was encoded by others, or the run began with another vocabulary, or a loss that compares
            samples would do so with another number of them.
    """
    own = _encoded(data)
    for label, loading in evals.items():
        if data.manifest is not None and loading.manifest is not None:
            what = f"evals.{label}: not encoded as the training data is"
            compare_manifest(loading.manifest, data.manifest.encoders(), what)
            warn_of_other_arguments(f"evals.{label}", loading.manifest, data.manifest)
        if data.vocabulary is not None and loading.vocabulary is not None:
            compare_vocabulary(f"evals.{label}", loading.vocabulary, own[VOCABULARY], "of the training data")
    allowed = "data" in recipe.checkpoints.allow_changes
    resumed = recipe.checkpoints.resumes and has_checkpoints(Path(recipe.output))
    if resumed:
        run, record = Path(recipe.output), record_of(recipe)
    elif not allowed and recipe.checkpoints.load_path and "://" not in recipe.checkpoints.load_path:
        checkpoint = Path(recipe.checkpoints.load_path).resolve()
        run = checkpoint.parent.parent
        record = record_with(run, checkpoint, run)
    else:
        if recipe.checkpoints.load_weights and not recipe.checkpoints.load_path:
            _warn_of_other_encoders(whole_of(Path(recipe.checkpoints.load_weights)), data)
        return
    if values := encoded_of(record):
        of_run, vocabulary = f"of {run}, whose checkpoint is loaded", values.pop(VOCABULARY, None)
        samples = values.pop(SAMPLES, None)
        before, now = values.pop(COMPARED, None), _compared(recipe)
        changes = _is_below("training.microbatch", recipe.checkpoints.allow_changes)
        if resumed and before not in (None, now) and not changes:
            raise ValueError(
                f"checkpoints.autoresume: the loss of {run} compares {before} samples with each other at a time, and "
                f"would now compare {now}: go on with as many devices, or the same training.microbatch, or with "
                "'checkpoints.allow_changes=[training.microbatch]'"
            )
        if resumed and samples not in (None, data.samples):
            log.warning(
                f"data: an epoch of {run} had {samples} samples at its checkpoint and has {data.samples} now. The "
                "order of samples is drawn anew, so the current epoch repeats some samples and omits others"
            )
        if allowed:
            return
        if data.manifest is not None:
            compare_manifest(data.manifest, values, f"data: not encoded as that {of_run}")
        if vocabulary is not None and data.vocabulary is not None:
            compare_vocabulary("data", data.vocabulary, vocabulary, of_run)


def encoded_of(record: Path) -> dict[str, Any]:
    """What `keep_record` has written of the training data into a folder; empty if there is nothing.

    Raises:
        ValueError: the file is damaged.
    """
    return _kept(record / ENCODED)


def _kept(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except ValueError as error:
        raise ValueError(f"{file}: damaged ({error}); copy the run's folder again") from None


def _warn_of_other_encoders(export: Path, data: Loading) -> None:
    """A line if the weights of an export were trained on what other encoders made than those of the data, or with
    another vocabulary. A pipeline of diffusers is not compared: its encoders have other names, or another form, and so
    other hashes."""
    if not (export / "export.json").is_file():
        return
    if data.manifest is not None and (export / MANIFEST).is_file():
        then, now = Manifest.read(export).encoders(), data.manifest.encoders()
        others = [f"{name} was {then[name]}, is {now[name]}" for name in now if then.get(name, now[name]) != now[name]]
        if others:
            log.warning(
                f"{export / MANIFEST}: the weights were trained on data that other encoders made: {'; '.join(others)}; "
                "they have to learn it anew"
            )
    copy = export / COPY
    if data.vocabulary is not None and copy.is_file() and VocabularyFile.read(copy).sha256 != data.vocabulary.sha256:
        log.warning(
            f"{copy}: the weights were trained with another vocabulary than {data.vocabulary.path}; they have to learn "
            "its tokens anew"
        )


def compare_vocabulary(key: str, file: VocabularyFile, expected: str | None, of: str) -> None:
    """Compare a vocabulary with what a record says of one.

    Args:
        key: of the recipe, for messages.
        expected: sha256; None: the record says nothing.
        of: what has that one.

    Raises:
        ValueError: it is another one.
    """
    found = file.sha256
    if found != (expected or found):
        raise ValueError(
            f"{key}: the vocabulary {file.path} (sha256 {found}) is not that {of} ({expected}): the model would read "
            "other tokens; restore its file"
        )


def compare_manifest(manifest: Manifest, expected: dict[str, Any], what: str) -> None:
    """Compare the encoders of a set with what a record says of some.

    Raises:
        ValueError: they are others; the message begins with `what`.
    """
    try:
        manifest.check(**expected)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
