"""Weights in formats that other programs open, without unpickling: diffusers or open_clip folders of safetensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from callbacks.averaged import averaged
from callbacks.divided_weights import host_bytes, write_divided
from data.aliases import Duration
from data.cost import FLOAT, Cost, Files, Plan, size_text
from data.encoded.manifest import NULL_TEXT, Manifest
from data.loading import Loading
from data.system.files import atomic_folder, read_if_object, write_json
from data.system.log import log
from data.tokenizers.vocabulary_files import copy_vocabulary
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.sharding.shard import is_sharded, whole_weights
from recipes.encoders import open_clip_models, text, vae
from recipes.models.task import Task
from recipes.training.callback import PeriodicCallback
from recipes.training.clock import Clock
from recipes.training.finite import is_worth_keeping
from recipes.training.ranks import by_first_rank, is_first_rank, on_all_ranks
from recipes.training.run import Run

ENCODERS = ("image_encoder", "text_encoder")  # in a manifest, and the folders of their copies in an export
# Files of weights by their suffixes, and which of them an encoder reads; others read any.
SUFFIXES = (".bin", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors")
READ = {"kl_vae": vae.WEIGHTS, "hf_clip_text": text.WEIGHTS, "open_clip_text": open_clip_models.WEIGHTS}


class Export(PeriodicCallback):
    """Writes <output>/export at intervals and at the end, atomically.

    If the run averages its weights, the export of a diffusion model holds the averaged weights beside the raw ones
    (`unet_ema` beside `unet`). The export of an autoencoder or text encoder, which other jobs open as one folder, holds
    only the averaged weights.
    """

    def __init__(
        self,
        task: Task,
        run_name: str,
        output: str,
        loading: Loading,
        blank: Callable[[], Task],
        average: ScheduledEMA | None,
        started_from: str | None,
        *,
        every: Duration | None = None,
    ) -> None:
        """A sharded task is written tensor by tensor, or gathered into the first rank's host memory, in a task that
        `blank` makes; see `Task.exported`.

        Args:
            every: interval; null: only at the end of the run, when weights are always written.
        """
        super().__init__(every)
        self.task = task
        self.run_name = run_name
        self.folder = Path(output, "export")
        self.loading = loading
        self.blank = blank
        self.average = average
        self.started_from = started_from

    def act(self, run: Run) -> None:
        if run.clock.ended:  # the last export is written once, by `end`
            return
        if is_worth_keeping(run):
            self._write(run, complete=False)
        else:
            log.warning(f"export: batch {run.clock.batch} is not finite; {self.folder} is left as it is")

    def is_complete(self, clock: Clock) -> bool:
        return read_if_object(self.folder / "done.json").get("batches") == clock.batch

    def end(self, run: Run) -> None:
        """Write the last export.

        Raises:
            ValueError: a weight is not finite.
        """
        if not is_worth_keeping(run):
            raise ValueError(f"export: weights are not finite at the end of the run; {self.folder} is left as it is")
        self._write(run, complete=True)

    def _write(self, run: Run, complete: bool) -> None:
        """Every rank must call it: the first one writes, and the others wait here, however long it takes."""
        record = {"run_name": self.run_name, "batches": run.clock.batch, "samples": run.clock.sample}
        if self.started_from is not None:
            record["started_from"] = self.started_from
        ema, average = self.average, None
        if ema is not None and ema.running:
            record["average"] = {"decay": ema.decay, "every": ema.every, "begun": ema.begun}
            average = partial(averaged, ema)
        if is_sharded(self.task) and self.task.exported is not None:
            self._write_divided(record, complete, average)
        else:
            task, average = self._gathered(average) if is_sharded(self.task) else (self.task, average)
            by_first_rank(lambda: export(task, self.loading, self.folder, record, complete, average))
        if complete:
            log.info(f"weights: {self.folder}")

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """The weights and encoders that it writes, see `data.cost`."""
        size = FLOAT * plan.parameters
        both = plan.averaged and plan.task.exports_average_beside
        what = f"{size_text(size)} of weights" + (f", {size_text(2 * size)} with the averaged ones" if both else "")
        files = () if plan.manifest is None else encoder_files(plan.manifest)
        encoders = sum(file.stat().st_size for file, _ in files)
        what += f", and {size_text(encoders)} of encoders" if encoders else ""
        held = size * (2 if both else 1) + encoders
        held *= 1 if args["every"] is None else 2  # the next one is whole before one goes
        lines = ()
        if plan.shards > 1:
            part, at_once = plan.task.exported, size * (2 if plan.averaged else 1)
            if part is not None:
                at_once = host_bytes(plan.task.get_submodule(part).state_dict().values())
            lines = (f"{size_text(at_once)} of host memory on the first machine while the weights are written",)
        return Cost(files=Files(args["every"], what, f"{plan.output}/export", held), lines=lines)

    def _write_divided(
        self, record: dict[str, Any], complete: bool, average: Callable[[], AbstractContextManager] | None
    ) -> None:
        """Write a sharded task, of which no rank ever holds the whole. Every rank must call it."""
        beside = average is not None and self.task.exports_average_beside
        first = average if average is not None and not beside else nullcontext
        with ExitStack() as stack:  # of the first rank, whose folder is removed after an error of any rank
            bundle = bundle_of(self.loading.manifest, self.folder)
            frame = export_folder(self.task, self.loading, self.folder, record, complete, bundle)
            new = by_first_rank(lambda: stack.enter_context(frame))
            for is_average, context in [(False, first), *([(True, average)] if beside else [])]:
                with context():
                    write_divided(self.task, new, self.folder, is_average)
            by_first_rank(stack.close)

    def _gathered(
        self, average: Callable[[], AbstractContextManager] | None
    ) -> tuple[Task, Callable[[], AbstractContextManager] | None]:
        """A whole task in the first rank's host memory, and how it gets averaged weights. Every rank must call it."""
        raw = whole_weights(self.task)
        if average is not None:
            with average():
                averages = whole_weights(self.task)

        def built() -> Task:
            if not is_first_rank():
                return self.task
            task = self.blank()
            task.load_state_dict(raw, assign=True)
            return task

        task = on_all_ranks(built)
        if average is None or not is_first_rank():
            return task, None

        @contextmanager
        def with_averages() -> Iterator[None]:
            task.load_state_dict(averages, assign=True)
            yield
            task.load_state_dict(raw, assign=True)

        return task, with_averages


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
            copy_vocabulary(loading.vocabulary, new)
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


def encoder_files(manifest: Manifest, bundle: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """The files of local encoders that an export has copies of, so that it can be moved, and where in it these are.

    Encoders of a hub are found by their id. The manifest of a set of somebody else may name any folder: one without
    weights, such as a folder of credentials, must not get into an export, which is passed on.

    Args:
        manifest: of the encoded set.
        bundle: folder whose copies are taken instead, as far as it has them.
    """
    for name in ENCODERS:
        if bundle is not None and (bundle / name).is_dir():
            copies = (file for file in (bundle / name).rglob("*") if file.is_file())
            yield from ((file, file.relative_to(bundle)) for file in copies)
            continue
        component = (getattr(manifest, name) or {"component": {}})["component"]
        _, _, of_model = (component.get("model") or "").partition(open_clip_models.LOCAL_PREFIX)
        folder = component.get("path") or of_model
        path, weights = Path(folder).expanduser(), Path(component.get("pretrained") or "").expanduser()
        if folder and path.is_dir():
            parts = _parts_of(component)
            if not any(_has_weights(path / part) for part in parts):
                log.warning(f"export: {path}, which the data's manifest names as {name}, holds no weights; not copied")
                continue
            found = {file.relative_to(path): file for part in parts for file in (path / part).rglob("*")}
            for inside, file in found.items():
                if file.is_file() and _is_read(inside, component.get("name")):
                    yield file, Path(name, inside)
            words = component.get("tokenizer") or ""
            for file in text.WORDS if text.lies_outside(words) else ():  # no others of a folder without weights
                if (path / words / file).is_file():
                    yield path / words / file, Path(name, text.SEPARATE, file)
        elif weights.is_file() and weights.suffix in SUFFIXES:
            yield weights, Path(name, weights.name)


def _is_read(file: Path, encoder: str | None) -> bool:
    """Whether an encoder may read a file of its folder. A repository of the hub has the same weights up to four times,
    some as pickles, and a checkout of it has them again in .git."""
    hidden = any(part.startswith(".") for part in file.parts)
    return not hidden and (file.suffix not in SUFFIXES or file.name == READ.get(encoder, file.name))


def _has_weights(folder: Path) -> bool:
    """Whether a folder, or a folder in it, holds a file of weights."""
    return any(file.suffix in SUFFIXES for pattern in ("*", "*/*") for file in folder.glob(pattern))


def _parts_of(component: dict[str, Any]) -> set[str]:
    """The folders that an encoder reads in its local folder, such as vae in a whole pipeline; "": all of it but what
    links to other folders. A tokenizer may lie outside of it."""
    model, words = component.get("subfolder") or "", component.get("tokenizer")
    parts = {model, model if words is None or text.lies_outside(words) else words}
    return {""} if any(map(text.lies_outside, parts)) else parts
