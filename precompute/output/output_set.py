"""The folder of an encoded set: which shards are done, and how they become one set.

Ranks share nothing but this folder::

    OUT/options.json              the options that the values depend on, written by the first process
    OUT/config.yaml               the whole config of the last job that wrote here, for precompute/verify.py
    OUT/shards/<id>.tmp-<rank>/   a shard that is being written
    OUT/shards/<id>/              a finished shard: MDS files, index.json, rejected.jsonl and done.json; the folder is
                                  renamed to this name when it is complete. uploaded.txt: where its copy is
    OUT/begun/<id>                which rank has begun a shard (see `precompute.output.claims`); removed with the merge
    OUT/unreadable/<id>.json      why an input shard could not be read; it is tried again at the next start
    OUT/null_text.npy             embedding of the empty caption, where captions are embedded
    OUT/index.json, OUT/rejected.jsonl, OUT/manifest.json
                                  of all shards, written by the process that finds all of them done, the manifest last;
                                  it locks a file beside OUT meanwhile
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.encoded.manifest import NAME, NULL_TEXT, REJECTED, Manifest
from data.encoded.mds_index import INDEX
from data.system.disk_errors import about
from data.system.files import (
    atomic_write,
    is_old,
    name_once,
    parse_object,
    read_object,
    remove_partial,
    to_disk,
    write_json,
)
from data.system.side_by_side import side_by_side
from precompute.config import EARLIER_RESAMPLING, RESAMPLING, EncodeConfig, changed_option
from precompute.output.folder_gone import FolderGone
from precompute.output.merged_index import END, merged_shards
from precompute.output.problems import Problem
from precompute.output.shard_facts import wrong_entry, wrong_fact
from precompute.output.totals import counts_text, rejected, totals
from precompute.output.upload import MARKER, Copy

OPTIONS = "options.json"
CONFIG = "config.yaml"
DONE = "done.json"
UNREADABLE = "unreadable"
BEGUN = "begun"
MERGING = ".lock-merge-{}"  # in the folder of the job, of a set's label: who writes its index
STALE = 3600.0  # seconds since its last change after which what a process began is removed, where others finished it


class NothingEncoded(ValueError):
    """All samples of a source were rejected."""


class OutputSet:
    """One output folder and the shards that belong into it.

    Args:
        out: the folder.
        shards: ids of the source's shards, in order.
        copy: the copy in an object store that is made as well; None: there is none.
    """

    def __init__(self, out: str | Path, shards: list[str], copy: Copy | None = None) -> None:
        self.out = Path(out)
        self.shards = shards
        self.copy = copy

    def folder(self, shard: str) -> Path:
        """Folder of a finished shard."""
        return self.out / "shards" / shard

    def partial(self, shard: str, rank: int) -> Path:
        """Folder in which a rank writes a shard."""
        return self.out / "shards" / f"{shard}.tmp-{rank}"

    def is_encoded(self, shard: str) -> bool:
        """Whether a finished shard is in the folder."""
        return (self.folder(shard) / DONE).is_file()

    def is_done(self, shard: str) -> bool:
        """Whether a finished shard is in the folder, and in the copy where one is made."""
        return self.is_encoded(shard) and (self.copy is None or self.copy.has(self.folder(shard)))

    def to_upload(self, shard: str) -> dict[str, Any] | None:
        """What `Uploads` takes: what training reads of a finished shard, and what says how it was made. None where no
        copy is made, or the shard is in it."""
        if self.copy is None or self.is_done(shard):
            return None
        folder = self.folder(shard)
        names = sorted(path.name for path in folder.iterdir() if path.name != MARKER)
        return {
            "set": str(self.copy.folder),
            "address": self.copy.address,
            "folder": str(folder),
            "place": f"shards/{shard}",
            "names": names,
        }

    def absent(self) -> list[str]:
        """Shards of which there is no finished folder, in order. The folders of others are not looked into.

        Raises:
            ValueError: the output folder, or a folder above it, is a file.
        """
        # One listing instead of one look-up per shard: jobs on network file systems have tens of thousands of shards,
        # which all ranks ask for at the same time.
        try:
            present = {entry.name for entry in os.scandir(self.out / "shards")}
        except FileNotFoundError:
            present = set()
        except NotADirectoryError:
            message = f"out: {self.out / 'shards'} cannot be a folder, a file is there; give another `out`"
            raise ValueError(message) from None
        return [shard for shard in self.shards if shard not in present]

    def remaining(self) -> list[str]:
        """Shards that are not done yet, in order. Raises as `absent`."""
        absent = set(self.absent())
        done = side_by_side(lambda shard: shard not in absent and self.is_done(shard), self.shards)
        return [shard for shard, is_done in zip(self.shards, done, strict=True) if not is_done]

    def samples_per_shard(self) -> float | None:
        """Average number of samples, rejected ones included, of a few finished shards; None without any."""
        finished = [shard for shard in self.shards[:50] if self.is_done(shard)][:5]
        markers = [self._done(shard) for shard in finished]
        sizes = [marker["samples"] + sum(marker["rejected"].values()) for marker in markers]
        return sum(sizes) / len(sizes) if sizes else None

    def unknown_shards(self) -> int:
        """Number of finished shards in the folder that the source does not have; they are not in the index."""
        known = set(self.shards)
        others = [entry.path for entry in os.scandir(self.out / "shards") if entry.name not in known]
        return sum(os.path.isfile(os.path.join(path, DONE)) for path in others)

    def is_complete(self, request: dict[str, Any], own: Collection[str]) -> bool:
        """Whether all shards are done and merged into a set that was made for this request.

        Args:
            request: see `precompute.config.EncodeConfig.request`; it also holds `precompute.config.source_options`.
            own: shards whose folders are looked into: those of this rank's share.
        """
        embedded = request.get("text_encoder", NULL_TEXT) is not None  # a set of tokens has no text encoder
        needed = [INDEX, NULL_TEXT] if embedded else [INDEX]
        # What takes long comes last: look-ups in folders, and the index.
        if self.absent() or not all((self.out / name).is_file() for name in needed):
            return False
        if self.copy is not None and not self.copy.has(self.out):
            return False
        try:
            manifest = Manifest.read(self.out)
            same = changed_option(manifest.request, _as_json(request)) is None and manifest.shards == len(self.shards)
            if not same or not all(side_by_side(self.is_done, own)):
                return False
            merged = merged_shards(self.out / INDEX)
            # A shard whose samples were all rejected is not in the index.
            return list(merged) == [shard for shard in self.shards if shard in merged or self._done(shard)["samples"]]
        except (FileNotFoundError, ValueError):
            return False

    def claim(self, options: dict[str, Any]) -> None:
        """Writes the options that the folder's values depend on, or compares them with those that are there.

        Raises:
            ValueError: the folder, or its copy, holds values made with other options; the message names the first
                difference.
            Outage: the store of the copy does not answer.
        """
        (self.out / "shards").mkdir(parents=True, exist_ok=True)
        path, wanted = self.out / OPTIONS, _as_json(options)
        if not path.is_file():
            for found in self._made_with():
                self._compare(found, wanted)
            partial = self.out / f".{OPTIONS}.{os.uname().nodename}.{os.getpid()}"
            with about(path, partial):
                try:
                    partial.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
                    to_disk(partial)
                    name_once(partial, path)
                finally:
                    partial.unlink(missing_ok=True)
        self._compare(_read_json(path, remove=path), wanted)
        # A set from another folder: its manifest would say how both were made until this job has uploaded all shards.
        if self.copy is not None and (found := self.copy.read_object(OPTIONS)) is not None:
            advice = "give another `upload`, or remove what is there"
            self._compare(found, wanted, f"upload: {self.copy.address}", advice)

    def check(self, options: dict[str, Any]) -> None:
        """Compares some or all options with those that the folder's values were made with. Writes nothing.

        Raises:
            ValueError: see `claim`.
        """
        wanted = _as_json(options)
        for found in self._made_with():
            self._compare({name: value for name, value in found.items() if name in wanted}, wanted)

    def _made_with(self) -> Iterator[dict[str, Any]]:
        """The options of the folder, or of each finished shard where the folder has none."""
        path = self.out / OPTIONS
        if path.is_file():
            yield _read_json(path, remove=path)
        else:
            absent = set(self.absent())
            present = (shard for shard in self.shards if shard not in absent)
            yield from (self._done(shard)["options"] for shard in present if self.is_encoded(shard))

    def _compare(
        self,
        found: dict[str, Any],
        options: dict[str, Any],
        where: str | Path = "",
        advice: str | None = None,
    ) -> None:
        """Raises an error where options of the folder are not these, which are as JSON gives them back."""
        name = changed_option(found, options)
        if name is not None:
            earlier = name == RESAMPLING and name not in found
            value = EARLIER_RESAMPLING if earlier else found.get(name)
            finish = "finish it with that version, " if earlier else ""
            if advice is None:
                advice = f"give another `out`, or delete the folder to encode again{but_scores(self.out)}"
            raise ValueError(
                f"{where or self.out}: holds values made with {name} {value}, this job has {options.get(name)}; "
                f"{finish}{advice}"
            )

    def publish(self, shard: str, rank: int) -> None:
        """Renames the folder of a written shard to its final name. Does nothing where another rank was first.

        Raises:
            FolderGone: there is no such folder.
        """
        partial, final = self.partial(shard, rank), self.folder(shard)
        if self.is_encoded(shard):
            shutil.rmtree(partial, ignore_errors=True)  # where another rank has removed it, see `remove_stale`
            return
        if not partial.is_dir():
            raise FolderGone(partial)
        try:
            # On disk before the rename: after a power failure a finished shard must not be empty.
            to_disk(partial)
            if final.is_dir() and not self.is_encoded(shard):
                shutil.rmtree(final)
            os.rename(partial, final)
        except OSError:
            if not self.is_encoded(shard):
                raise
            shutil.rmtree(partial, ignore_errors=True)  # as above

    def note_unreadable(self, shard: str, problem: Problem) -> None:
        """Writes down that an input shard could not be read, for the ranks that finish later."""
        facts = {"shard": shard, "problem": problem.text, "outage": problem.outage}
        write_json(self.out / UNREADABLE / f"{shard}.json", facts)

    def forget_unreadable(self, shards: Collection[str]) -> None:
        """Removes the notes of shards that are tried again."""
        for path in (self.out / UNREADABLE).glob("*.json"):
            if path.stem in shards:
                path.unlink(missing_ok=True)

    def unreadable(self) -> dict[str, Problem]:
        """Input shards that could not be read, each with the problem."""
        found = {}
        for path in sorted((self.out / UNREADABLE).glob("*.json")):
            with suppress(FileNotFoundError):  # a rank that has just started tries it again
                values = _read_json(path, remove=path)
                found[values["shard"]] = Problem(values["problem"], values.get("outage", False))
        return found

    def merge(self, fields: dict[str, Any], options: dict[str, Any], leave_out: Collection[str] = ()) -> Manifest:
        """Writes the index, the rejected samples and the manifest of all shards, the manifest last.

        Args:
            fields: the manifest's fields that are not counted from the shards.
            options: see `claim`.
            leave_out: shards that are not in the set.

        Raises:
            ValueError: a shard was made with other options or is damaged.
            NothingEncoded: there is no sample at all.
        """
        # The set changes, so the copy no longer holds it; by the mark, the next start would take it for complete.
        (self.out / MARKER).unlink(missing_ok=True)
        counted = totals(self.join(options, leave_out))
        manifest = Manifest(**fields, **counted, where=str(self.out / NAME))
        manifest.write(self.out)
        if self.copy is not None:
            beside = [name for name in (OPTIONS, CONFIG, NULL_TEXT) if (self.out / name).is_file()]
            self.copy.add(self.out, "", [*beside, REJECTED, INDEX, NAME])
        self.forget_unreadable(set(self.shards).difference(leave_out))  # of ranks that could not read what others could
        self.remove_stale()
        return manifest

    def join(self, options: dict[str, Any], leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
        """Writes the index and the rejected samples of all shards, and returns the contents of their done.json.

        Args and errors are those of `merge`.
        """
        wanted = _as_json(options)
        markers = []
        shards = (shard for shard in self.shards if shard not in leave_out)
        # Shard by shard: of hundreds of millions of input samples the rejected ones alone are gigabytes, and so is the
        # index of their files.
        with (
            atomic_write(self.out / INDEX) as partial_index,
            open(partial_index, "w", encoding="utf-8") as index,
            atomic_write(self.out / REJECTED) as partial_rejected,
            open(partial_rejected, "wb") as rejected_lines,
        ):
            index.write('{"version": 2, "shards": [')
            comma = ""
            for marker, entries, lines in side_by_side(lambda shard: self._parts(shard, wanted), shards):
                markers.append(marker)
                if entries:
                    index.write(comma + entries)
                    comma = ", "
                rejected_lines.write(lines)
            index.write(END.decode())
            if not any(marker["samples"] for marker in markers):
                counts = rejected(markers)
                reasons = [counts_text(counts.items())] if counts else []
                if left := sum(marker.get("left_out", 0) for marker in markers):  # of packed texts
                    reasons.append(f"{left:,} tokens of texts fill no row; give fewer positions, or longer texts")
                why = "; ".join(reasons) or "the source is empty"
                raise NothingEncoded(
                    f"{self.out}: nothing was encoded ({why}); see shards/*/{REJECTED}; correct the cause, and "
                    f"delete this folder before you encode again{but_scores(self.out)}"
                )
        return markers

    def _parts(self, shard: str, options: dict[str, Any]) -> tuple[dict[str, Any], str, bytes]:
        """A finished shard's done.json without the options, its entries of the index, and its rejected samples.

        Args:
            shard: its id.
            options: as JSON gives them back.

        Raises:
            ValueError: see `merge`.
        """
        marker = self._done(shard)
        self._compare(marker.pop("options"), options)
        entries = self._json(shard, INDEX, "shards")["shards"]
        # Folders that were copied may have the name of another, or files of two encodings.
        if (name := marker.get("shard", shard)) != shard:
            raise _damaged(self.folder(shard) / DONE, f"it is of the shard {name}", remove=self.folder(shard))
        rejected_lines = self._read(shard, REJECTED)
        if (reason := wrong_entry(marker, entries, rejected_lines)) is not None:
            raise _damaged(self.folder(shard), reason, remove=self.folder(shard))
        for info in entries:
            stored = info.get("zip_data") or info["raw_data"]
            self._check_size(shard, stored["basename"], stored["bytes"])
            # `streaming.base.util.merge_index` keeps one folder level only.
            for data in (info[key] for key in ("raw_data", "zip_data") if info.get(key)):
                data["basename"] = f"shards/{shard}/{data['basename']}"
        return marker, ", ".join(map(json.dumps, entries)), rejected_lines

    def remove_stale(self) -> None:
        """Removes what killed processes left of shards that another process finished, and of the files of the set."""
        shutil.rmtree(self.out / BEGUN, ignore_errors=True)
        for path in (self.out / "shards").glob("*.tmp-*"):
            if self.is_done(path.name.rpartition(".tmp-")[0]) and is_old(path, STALE):
                shutil.rmtree(path, ignore_errors=True)
        for name in INDEX, REJECTED, NAME, CONFIG, OPTIONS, NULL_TEXT:
            remove_partial(self.out / name, STALE)

    def _done(self, shard: str) -> dict[str, Any]:
        done = self._json(shard, DONE, "options")
        if (reason := wrong_fact(done)) is not None:
            raise _damaged(self.folder(shard) / DONE, reason, remove=self.folder(shard))
        return done

    def _json(self, shard: str, name: str, key: str) -> dict[str, Any]:
        """Content of a JSON file of a finished shard, which must hold `key`."""
        path = os.path.join(self.out, "shards", shard, name)
        try:
            values = parse_object(self._read(shard, name))
            reason = None if key in values else f"it has no `{key}`"
        except ValueError as error:
            reason = str(error)
        if reason is not None:
            raise _damaged(path, reason, remove=self.folder(shard))
        return values

    # Paths as texts: objects would take longer than a local disk.

    def _read(self, shard: str, name: str) -> bytes:
        """Content of a file of a finished shard. A folder that was copied may lack files or parts of them."""
        path = os.path.join(self.out, "shards", shard, name)
        try:
            with open(path, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise _damaged(path, "it is missing", remove=self.folder(shard)) from None

    def _check_size(self, shard: str, name: str, size: int) -> None:
        """Raises an error unless a file of a finished shard has `size` bytes."""
        path = os.path.join(self.out, "shards", shard, name)
        try:
            found = os.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise _damaged(path, "it is missing", remove=self.folder(shard)) from None
        if found != size:
            raise _damaged(path, f"{found:,} bytes instead of {size:,}", remove=self.folder(shard))


def output_of(config: EncodeConfig, label: str, shards: list[str]) -> OutputSet:
    """The output folder of one source of a job, with its copy where one is made."""
    folder = f"{config.out}/{label}"
    copy = None if config.upload is None else Copy(Path(folder), f"{config.upload.rstrip('/')}/{label}")
    return OutputSet(folder, shards, copy)


def _read_json(path: Path, remove: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise _damaged(path, str(error), remove) from None


def _damaged(path: Path | str, reason: str, remove: Path) -> ValueError:
    return ValueError(f"{path}: damaged ({reason}); delete {remove} and start the job again")


def _as_json(value: Any) -> Any:
    """The value as it comes back from a file: lists for tuples, strings for keys."""
    return json.loads(json.dumps(value))


def but_scores(*folders: Path) -> str:
    """What to keep of folders that a message says to delete: the scores that `precompute/scores.py` has written there,
    of a pass over all images, which the next job may need."""
    from data.score_files import FOLDER  # not above: it imports NumPy

    found = [str(path) for folder in folders if (path := folder / FOLDER).is_dir()]
    return f", but keep {', '.join(found)}" if found else ""
