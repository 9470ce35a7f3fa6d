"""A run's checkpoints in a bucket of an object store, from which the run goes on where its folder is older or lost.

Checkpoints are written to the run's folder, and then copied. Only when all of a checkpoint is in the
bucket, the object `latest.json` names it. An object appears whole or not at all, so what a killed process leaves is
never taken for a checkpoint. `latest.json` also holds the run's record, since a run that goes on must be the one that
it was.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from data.remote.downloads import advice, store_error
from data.remote.stores import check_environment, open_store
from data.system.errors import one_line
from data.system.files import atomic_folder, atomic_write
from recipes.training.checkpoint_names import KINDS, batch_of

LATEST = "latest.json"  # names the newest checkpoint, its link in the run's folder, and those that are kept
TRIAL = "writable"  # written when a run starts, and removed
LINKS = [kind.link for kind in KINDS.values()]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
REMOVE = "remove that object, and the next checkpoint writes it anew"


class Bucket:
    """A folder of a bucket.

    Args:
        address: s3://, gs:// or azure://; see `data.remote.stores.FORMS`.

    Raises:
        ValueError: from `check_environment`.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        check_environment(self.address)
        self._store = open_store(self.address)

    @contextmanager
    def _answers(self, what: str) -> Iterator[None]:
        """A context for calls of the store, in which Python's generator of random numbers keeps its state.

        Clients draw their pauses from it. A run must not depend on where its checkpoints are.

        Raises:
            ValueError: the store refuses what is done inside.
            Outage: it does not answer, also when asked again.
        """
        generator = random.getstate()
        try:
            yield
        except (*self._store.errors, OSError) as error:
            raise store_error(f"{self.address}/{what} ({one_line(error)}); {advice(error)}", error) from error
        finally:
            random.setstate(generator)

    def latest(self) -> dict[str, Any] | None:
        """What `latest.json` says, or None if there is none.

        `checkpoint` is the name of the newest one, `link` that of the link to it, `kept` those of all, and `record` has
        the texts of the run's record by names of files.

        Raises:
            ValueError: it names no checkpoint, the store refuses it, or does not answer.
        """
        with self._answers(f"{LATEST}: cannot be read"):
            return self._latest()

    def _latest(self) -> dict[str, Any] | None:
        if LATEST not in self._store.names(LATEST):
            return None
        try:
            latest = json.loads(self._store.read(LATEST))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.address}/{LATEST}: not JSON ({error}); {REMOVE}") from None
        texts = [latest.get("checkpoint"), latest.get("link")] if isinstance(latest, dict) else [None]
        kept = latest.get("kept") if isinstance(latest, dict) else None
        named = [*texts, *(kept if isinstance(kept, list) else [None])]
        record = latest.get("record", {}) if isinstance(latest, dict) else {}
        plain = isinstance(record, dict) and all(isinstance(text, str) for text in record.values())
        # They become names in the run's folder: a path, or the name of another object, must not.
        named_well = all(isinstance(name, str) and NAME.fullmatch(name) for name in named)
        # A link takes the place of what has its name, which must not be a checkpoint.
        if not (plain and named_well and texts[1] in LINKS) or batch_of(texts[0]) is None:
            raise ValueError(f"{self.address}/{LATEST}: does not name a checkpoint; {REMOVE}")
        return latest

    def check_writable(self, keep: int) -> None:
        """
        Args:
            keep: as of `push`.

        Raises:
            ValueError: the store refuses a small object, or to remove it where `keep` needs that, or does not answer.
        """
        with self._answers(f"{TRIAL}: cannot be written"):
            self._store.write(TRIAL, b"")
        may_stay = suppress(ValueError) if keep == -1 else nullcontext()
        with may_stay, self._answers(f"{TRIAL}: cannot be removed, which checkpoints.keep: {keep} needs"):
            self._store.delete(TRIAL)

    def push(self, path: Path, link: str, keep: int, record: Mapping[str, str]) -> None:
        """Copy a checkpoint, then name it the newest, and remove what earlier ones need no more.

        Args:
            path: of the checkpoint, a file or a folder.
            link: name of the link to the newest one in the same folder, by which engines know their checkpoints.
            keep: number of checkpoints that stay in the bucket; -1: all.
            record: texts of the run's record, by names of files.

        Raises:
            ValueError: the store refuses it, or does not answer. The checkpoint on the disk stays.
        """
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        names = {f"{path.name}/{file.name}" if path.is_dir() else file.name: file for file in files}
        with self._answers(f"{path.name}: cannot be written"):
            before = self._latest() or {"checkpoint": None, "kept": []}
            if path.is_dir() and before["checkpoint"] == path.name:
                # Of a run that was here before: a kill in between must not leave a mixture of both that is named.
                self._store.delete(LATEST)
            for name in set(self._store.names(f"{path.name}/")) - set(names):
                self._store.delete(name)  # a part of more ranks, or of the other engine, which would be fetched, too
            for name, file in names.items():
                self._store.upload(file, name)
            kept = [name for name in before["kept"] if name != path.name] + [path.name]
            kept = kept if keep == -1 else kept[-keep:]
            latest = {"checkpoint": path.name, "link": link, "kept": kept, "record": dict(record)}
            self._store.write(LATEST, json.dumps(latest, indent=1).encode())
            for name in self._store.names("ep") if keep != -1 else ():
                checkpoint = name.split("/")[0]
                if checkpoint not in kept and (found := batch_of(checkpoint)) and found < batch_of(path.name):
                    self._store.delete(name)
            self._store.abort_uploads(names, lambda name: batch_of(name) is not None)

    def fetch(self, name: str, path: Path) -> None:
        """Fetch an object as a file, or all objects below a name as a folder. The path appears whole or not at all.

        Raises:
            ValueError: there is no such object, the store refuses it, or it does not answer.
        """
        with self._answers(f"{name}: cannot be fetched"):
            names = self._store.names(name)
            if name in names:
                self._download(name, path)
                return
            parts = [part for part in names if part.startswith(f"{name}/")]
            if not parts:
                raise FileNotFoundError("no such object")
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(path) as partial:
                for part in parts:
                    self._download(part, partial / Path(part).name)

    def _download(self, name: str, path: Path) -> None:
        with atomic_write(path) as partial:
            self._store.download(name, partial)
