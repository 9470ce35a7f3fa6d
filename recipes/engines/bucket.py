"""A run's checkpoints in a bucket of an object store, from which the run goes on where its folder is older or lost.

Checkpoints are written to the run's folder, and then copied by the first rank. Only when all of a checkpoint is in the
bucket, the object `latest.json` names it. An object appears whole or not at all, so what a killed process leaves is
never taken for a checkpoint. `latest.json` also holds the run's record, since a run that goes on must be the one that
it was.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.downloads import advice
from data.errors import one_line
from data.files import atomic_folder, atomic_write, point_to, write_text
from data.log import log
from data.stores import open_store
from recipes.engines.record import RECORD, keep_texts
from recipes.training.checkpoint_names import batch_of, newest_of_all
from recipes.training.ranks import by_first_rank

LATEST = "latest.json"  # names the newest checkpoint, its link in the run's folder, and those that are kept
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
REMOVE = "remove that object, and the next checkpoint writes it anew"


class Bucket:
    """A folder of a bucket.

    Args:
        address: s3://, gs:// or azure://; see `data.stores.FORMS`.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._store = open_store(self.address)

    @contextmanager
    def _answers(self, what: str) -> Iterator[None]:
        """A context for calls of the store, in which Python's generator of random numbers keeps its state.

        Clients draw their pauses from it, and Google's also draws from it in each upload. A run must not depend on
        where its checkpoints go.

        Raises:
            ValueError: the store refuses what is done inside, or does not answer, also when asked again.
        """
        generator = random.getstate()
        try:
            yield
        except (*self._store.errors, OSError) as error:
            raise ValueError(f"{self.address}/{what} ({one_line(error)}); {advice(error)}") from error
        finally:
            random.setstate(generator)

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
        if not (plain and named_well) or batch_of(texts[0]) is None:
            raise ValueError(f"{self.address}/{LATEST}: does not name a checkpoint; {REMOVE}")
        return latest

    # --- from the run's folder -----------------------------------------------------------------

    def push(self, path: Path, link: str, keep: int) -> None:
        """Copy a checkpoint and the run's record, and remove what earlier ones need no more. Only the first rank calls
        this.

        Args:
            path: of the checkpoint, a file or a folder.
            link: name of the link to the newest one in the same folder, by which engines know their checkpoints.
            keep: number of checkpoints that stay in the bucket; -1: all.

        Raises:
            ValueError: the store refuses it, or does not answer. The checkpoint on the disk stays.
        """
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        names = {f"{path.name}/{file.name}" if path.is_dir() else file.name: file for file in files}
        record = [file for name in RECORD if (file := path.parent.parent / name).is_file()]
        texts = {file.name: file.read_text(encoding="utf-8") for file in record}
        with self._answers(f"{path.name}: cannot be written"):
            before = self._latest() or {"kept": []}
            for name, file in names.items():
                self._store.upload(file, name)
            kept = [name for name in before["kept"] if name != path.name] + [path.name]
            kept = kept if keep == -1 else kept[-keep:]
            latest = {"checkpoint": path.name, "link": link, "kept": kept, "record": texts}
            self._store.write(LATEST, json.dumps(latest, indent=1).encode())
            for name in self._store.names("ep"):
                checkpoint = name.split("/")[0]
                if checkpoint not in kept and (found := batch_of(checkpoint)) and found < batch_of(path.name):
                    self._store.delete(name)
            self._store.abort_uploads(names, lambda name: batch_of(name) is not None)

    # --- into the run's folder -----------------------------------------------------------------

    def pull(self, output: Path, check: Callable[[dict[str, str]], None] = lambda texts: None) -> None:
        """Fetch the newest checkpoint and the record, unless the run's folder has one that is as new.

        Only the first rank calls this, before it looks for checkpoints.

        Args:
            output: folder of the run.
            check: called with the texts of the record, by names of files, before anything is fetched; it raises if the
                bucket has another run's checkpoints.

        Raises:
            ValueError: the store refuses it, or does not answer; or from `check`.
        """
        with self._answers(f"{LATEST}: cannot be read"):
            latest = self._latest()
        if latest is None:
            return
        texts = {name: text for name, text in latest.get("record", {}).items() if name in RECORD}
        check(texts)
        folder, name = output / "checkpoints", Path(latest["checkpoint"]).name
        newest = newest_of_all(folder)
        if newest is not None and batch_of(newest.name) >= batch_of(name):
            return
        log.info(f"checkpoints: fetches {name} from {self.address}")
        keep_texts(output, folder / name, texts)
        self.fetch(name, folder / name)
        for record in set(texts) - {file.name for file in output.iterdir()}:
            write_text(output / record, texts[record])
        point_to(folder / Path(latest["link"]).name, folder / name)

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


def fetched(address: str, output: Path) -> Path:
    """The path of a checkpoint of a bucket in the run's folder, into which the first rank fetches it. Every rank must
    call it.

    Raises:
        ValueError: there is no such checkpoint, the store refuses it, or it does not answer.
    """
    folder, _, name = address.rstrip("/").rpartition("/")
    path = output / "fetched" / name
    by_first_rank(lambda: Bucket(folder).fetch(name, path))
    return path.resolve()

