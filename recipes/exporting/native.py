"""A checkpoint as this repository's own export: what the `export` callback would have written at that batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.sets import EncodedSet
from data.loading import Loading
from data.system.files import write_json
from data.tokenizers.vocabulary_files import VOCABULARY, VocabularyFile
from recipes.config.build import build, build_on_meta, encoders_of
from recipes.config.recipe import Recipe, load_config
from recipes.config.schema import Component
from recipes.config.values import ConfigError
from recipes.engines.checkpoints.deferred import Deferred
from recipes.engines.first_weights import started_from
from recipes.engines.record import COMPARED, SAMPLES, compare_manifest, compare_vocabulary, encoded_of, record_with
from recipes.engines.record import VOCABULARY as HASH  # its key
from recipes.exporting.checkpoints import Checkpoint, read_checkpoint
from recipes.exports.folder import bundle_of, export_folder
from recipes.generation.exports import Weights, find_network, read_record, weights_of
from recipes.models.task import Task
from recipes.models.tensor_file import TensorFile
from recipes.models.weights import load_tensors
from recipes.planning.run_summary import CONFIG

# What an encoded set must have in common with the model.
CHECKED = ("channels", "text_width", "codes", "side")


def from_checkpoint(
    path: Path, folder: Path, weights: Weights | None, recipe_file: Path | None, data: Path | None
) -> None:
    """Write an export of a checkpoint. No data is read but the encoded set's manifest and what lies beside it.

    Args:
        path: of the checkpoint.
        folder: to write.
        weights: averaged or as trained; None: averaged if there are any.
        recipe_file: the run's resolved config; None: config.yaml in the run's folder.
        data: folder with the manifest of the training data; None: the recipe's, or the run's own export.

    Raises:
        FileNotFoundError: the recipe, the manifest or an encoder is missing.
        ValueError: a checkpoint of another recipe, or an encoder that did not encode the training data.
    """
    deferred = Deferred()
    checkpoint = read_checkpoint(path, weights or "ema", deferred)
    run = path.parent.parent
    recipe = read_recipe(run / CONFIG if recipe_file is None else recipe_file)
    task = build_on_meta(recipe.model)
    averaged = load(task, checkpoint, weights, deferred)
    encoded = encoded_of(record_with(run, path, run))
    loading, bundle = training_data(recipe, task.requirements(), run / "export", data, encoded)
    record = {
        "run_name": recipe.run_name,
        "batches": checkpoint.batches,
        "samples": checkpoint.samples,
        "checkpoint": path.name,
        "weights": "averaged" if averaged else "as trained",
    }
    if (origin := started_from(recipe, run)) is not None:
        record["started_from"] = origin
    if loading.manifest is not None:
        encoders_of(loading.manifest, bundle)  # now, and not when somebody else opens the folder
    with export_folder(task, loading, folder, record, complete=False, bundle=bundle) as new:
        write_weights(task, new, deferred)


def read_recipe(file: Path) -> Recipe:
    """The resolved config of a run; paths in it need not exist any more.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it has mistakes.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; give the config of the checkpoint's run: --recipe FILE")
    try:
        return load_config(file, [], Recipe, missing=[])
    except ConfigError as error:
        raise ValueError(f"{file}: {error.lines[0]}") from None


def write_weights(task: Task, folder: Path, deferred: Deferred) -> None:
    """Write what `task.export` writes, one tensor after another where the task can be written so.

    Args:
        task: with the weights that `load` has given it.
        folder: to write in.
        deferred: as it was given to `load`.
    """
    if task.exported is None:
        return task.export(folder)
    tensors = task.get_submodule(task.exported).state_dict()
    with TensorFile(task.export_config(folder, averaged=False), tensors) as file:
        for name in file.names:
            file.write(name, deferred.read(tensors[name]))


def load(task: Task, checkpoint: Checkpoint, weights: Weights | None, deferred: Deferred) -> bool:
    """Load a checkpoint's weights into a task on the meta device; returns whether they are averaged.

    One that `write_weights` writes tensor by tensor gets stand-ins, if the checkpoint has such.

    Raises:
        ValueError: they do not fit, averaged ones are requested and there are none, or an export of averaged ones would
            have numbers of those of training (see `Task.measure`).
    """
    if weights == "ema" and not checkpoint.average:
        raise ValueError(f"--weights ema: {checkpoint.path} holds no averaged weights; use raw")
    averaged = bool(checkpoint.average) and weights != "raw"
    if averaged and type(task).measure is not Task.measure:
        raise ValueError(
            f"{checkpoint.path}: an export of averaged weights of {type(task).__name__} has numbers that its run "
            "measures, such as a scaling factor, and the checkpoint has those of the weights of training; take "
            f"{checkpoint.path.parent.parent}/export, which the run writes, or give --weights raw"
        )
    tensors = {**checkpoint.weights, **(_under_all_names(checkpoint.average, task) if averaged else {})}
    own = task.state_dict()
    # Averages are kept in 32 bits, whatever the parameters have.
    tensors = {name: deferred.to(t, own[name].dtype) if name in own else t for name, t in tensors.items()}
    if task.exported is None:
        tensors = {name: deferred.read(tensor) for name, tensor in tensors.items()}
    load_tensors(task, tensors, checkpoint.path, assign=True)
    return averaged


def _under_all_names(average: dict[str, Any], task: Task) -> dict[str, Any]:
    """An average has a parameter that several modules share under its first name only, weights under each."""
    first = {id(parameter): name for name, parameter in task.named_parameters()}
    names = {name: first[id(parameter)] for name, parameter in task.named_parameters(remove_duplicate=False)}
    shared = {name: average[of] for name, of in names.items() if of in average}
    return {**average, **shared}


def training_data(
    recipe: Recipe,
    requirements: dict[str, Any],
    export_of_run: Path,
    data: Path | None,
    encoded: dict[str, Any] | None = None,
) -> tuple[Loading, Path | None]:
    """What an export needs to know of the training data, without a loader, and a folder that may hold the encoders.

    Args:
        recipe: of the run.
        requirements: of its model.
        export_of_run: its own export, if there is one.
        data: folder with the manifest; None: the recipe's set, or the run's export.
        encoded: what the run's record says of the data; None: nothing. Another set or vocabulary may be in the same
            place by now.

    Raises:
        FileNotFoundError: the manifest, the null caption or the vocabulary is missing, or is not that of the run.
        ValueError: the set does not fit the model.
    """
    args = recipe.data.args
    if "streams" not in args:
        return Loading(loader=None), None
    streams = args["streams"]
    texts = "resolution" not in args  # packed ones, of which an export needs the vocabulary only
    needed = VOCABULARY if texts else MANIFEST
    beside = export_of_run if (export_of_run / needed).is_file() else None
    places = [EncodedSet(str(data), None, {})] if data is not None else [build(next(iter(streams.values())))]
    if data is None and beside is not None:
        places.append(EncodedSet(str(beside), None, {}))
    encoded, of_run = encoded or {}, f"of {export_of_run.parent}"
    expected = {name: value for name, value in encoded.items() if name not in (HASH, SAMPLES, COMPARED)}
    for place in places:
        try:
            if texts:
                found = VocabularyFile.read(place.file(VOCABULARY))
                compare_vocabulary("data", found, encoded.get(HASH), of_run)
                return Loading(loader=None, vocabulary=found), None
            manifest = place.manifest()
            compare_manifest(manifest, expected, f"data: not encoded as that {of_run}")
            known = vocabulary(args["vocabulary"], place, encoded.get(HASH), of_run) if "vocabulary" in args else None
            break
        except (FileNotFoundError, ValueError) as error:  # a remote set's store may refuse, or not answer
            missing = error
    else:
        raise FileNotFoundError(f"{missing}; or give a folder that has it: --data FOLDER")
    manifest.check(resolution=args["resolution"], **{n: v for n, v in requirements.items() if n in CHECKED})
    loading = Loading(
        loader=None,
        manifest=manifest,
        images=manifest.samples if len(streams) == 1 else _images(streams, export_of_run),
        resolution=args["resolution"],
        null_text=place.null_text(manifest.text_shape) if manifest.kind == "latents" else None,
        vocabulary=known,
    )
    return loading, data or bundle_of(manifest, export_of_run)


def _images(streams: dict[str, Component], export_of_run: Path) -> int | None:
    """The number of images in several encoded sets, or what the run's own export says; None: neither is there."""
    try:
        return sum(encoded.manifest().samples for encoded in build(streams).values())
    except (FileNotFoundError, ValueError):
        return read_record(export_of_run).get("images") if (export_of_run / "export.json").is_file() else None


def vocabulary(named: str, place: EncodedSet, expected: str | None, of: str) -> VocabularyFile:
    """The recipe's vocabulary or, if it has gone or is another one now, the copy in an export.

    Args:
        named: in the recipe.
        place: perhaps an export.
        expected, of: see `compare_vocabulary`.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: it is another one.
    """
    files = Path(named), Path(place.local, VOCABULARY)
    there = [VocabularyFile.read(file) for file in files if file.is_file()]
    if not there:
        raise FileNotFoundError(f"{named}: no such vocabulary; restore it")
    for file in there:
        try:
            compare_vocabulary("data", file, expected, of)
            return file
        except ValueError as error:
            other = error
    raise other


def from_export(source: Path, folder: Path, weights: Weights | None) -> None:
    """Copy an export with one kind of weights.

    Raises:
        FileNotFoundError: the export does not have the weights that are requested.
    """
    record, chosen = read_record(source), find_network(source, weights)
    name = chosen.name.removesuffix("_ema")
    networks = {name, f"{name}_ema"}
    shutil.copytree(source, folder, ignore=lambda at, names: {"done.json", *networks} if Path(at) == source else set())
    shutil.copytree(chosen, folder / name)
    record["weights"] = weights_of(source, chosen)
    write_json(folder / "export.json", record, indent=2)
