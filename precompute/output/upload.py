"""The copy of an encoded set in an object store: shards when they are finished, the manifest last."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

from data.remote.downloads import advice, ask_again, fetch, is_refused, lacks_credentials, store_error
from data.remote.stores import STORES, Store, check_environment, open_store, scheme_of
from data.system.errors import one_line
from data.system.files import read_object, write_text
from data.system.helper_process import HelperProcess
from data.system.log import every_rank

RETRIES = 4  # of streaming's uploaders, for stores that `data.remote.stores` has no client of
SCRIPT = Path(__file__).with_name("upload_process.py")
MARKER = "uploaded.txt"  # in the folder of a shard, and of the whole set: the address of the copy


class Copy:
    """The copy of one output folder. Nothing is asked of the store before the first file.

    Args:
        folder: the output folder.
        address: of the copy, such as s3://bucket/latents/train.

    Raises:
        ValueError: from `check_environment`.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address.rstrip("/")
        check_environment(self.address)

    @cached_property
    def _store(self) -> Store:
        return open_store(self.address)  # once, since each asks for a token

    def has(self, folder: Path) -> bool:
        """Whether a folder of this set is in the copy."""
        marker = folder / MARKER
        return marker.is_file() and marker.read_text("utf-8", "replace") == self.address

    def read_object(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a small file of the copy; None: there is none, or the credential only allows to write.

        Raises:
            ValueError: it holds something else, or there is no credential.
            Outage: the store does not answer.
        """
        address = f"{self.address}/{name}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            try:
                fetch(address, path, timeout=120.0)
            except Exception as error:  # each store's client has its own errors, without a common base class
                if is_refused(error) and not lacks_credentials(error):
                    return None
                line = f"upload: {address} cannot be read ({one_line(error)}); {advice(error)}"
                raise store_error(line, error) from error
            try:
                return read_object(path)
            except ValueError as error:
                raise ValueError(f"upload: {address}: damaged ({error}); give another `upload`, or remove it") from None

    def add(self, folder: Path, place: str, names: Iterable[str]) -> None:
        """Upload files of a folder, one after the other, then mark the folder.

        Args:
            folder: with the files.
            place: folder in the copy; "": its top.
            names: of the files, in order.

        Raises:
            ValueError: the store refuses a file.
            Outage: it does not answer.
        """
        address, names = f"{self.address}/{place}".rstrip("/"), list(names)
        try:
            if scheme_of(address) in STORES:
                objects = {f"{place}/{name}".lstrip("/"): folder / name for name in names}
                for name, path in objects.items():
                    ask_again(partial(self._store.upload, path, name), f"{self.address}/{name}")
                self._store.abort_uploads(objects)  # an earlier process may have been killed in the midst of one
            else:
                _upload_by_streaming(address, folder, names)
        except Exception as error:  # each store's client has its own errors, without a common base class
            what = advice(error, "see whether the address is right and the credential allows it")
            line = f"upload: {address} cannot be written ({one_line(error)}); {what}, then start the job again"
            raise store_error(line, error) from error
        write_text(folder / MARKER, self.address)


class Uploads:
    """Uploads, one after the other, by a process of their own. A context that waits for all of them at its end.

    After an error none is begun, nor where the context ends by one: the next start of the job makes up for them. A
    second Ctrl-C ends that which goes on.

    Args:
        needed: whether there will be any; else there is no process.
    """

    def __init__(self, needed: bool = True) -> None:
        self._needed = needed
        self._process = HelperProcess(SCRIPT)
        self._thread = ThreadPoolExecutor(1, "uploader")  # waits for the process
        self._begun: list[Future] = []
        self._error: BaseException | None = None

    def __enter__(self) -> Uploads:
        if self._needed:
            self._process.start()  # not in `add`, which threads call that end before the uploads do
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = sum(not upload.done() for upload in self._begun)
        if kind is None and left > 1 and self._error is None:
            every_rank.info(f"encode: {left} shards are still to be uploaded")
        if kind is not None and left:
            every_rank.info("encode: ends when the shard that is being uploaded is there; Ctrl-C ends it at once")
        try:
            self._thread.shutdown(cancel_futures=kind is not None)
        except BaseException:  # Ctrl-C while it waits: Python would finish all uploads before it exits
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._process.kill()
            raise
        self._process.end()
        if kind is None and self._error is not None:
            raise self._error

    def add(self, files: dict[str, Any]) -> None:
        """Begins to upload files after all others.

        Args:
            files: arguments of `Copy` and of `Copy.add`; see `precompute.output.upload_process`.

        Raises:
            ValueError: an earlier upload has failed.
        """
        if self._error is not None:
            raise self._error
        self._begun.append(self._thread.submit(self._run, files))

    def _run(self, files: dict[str, Any]) -> None:
        if self._error is None:
            try:
                self._process.do(files)
            except BaseException as error:  # raised again in another thread
                self._error = error


def _upload_by_streaming(address: str, folder: Path, names: list[str]) -> None:
    # Not above: the config is checked before imports that take seconds.
    from streaming.base.storage import CloudUploader

    with tempfile.TemporaryDirectory() as empty:  # uploaders warn of a folder that is not empty
        uploader = CloudUploader.get((empty, address), keep_local=True, retry=RETRIES)
        uploader.local = str(folder)
        for name in names:
            uploader.upload_file(name)
