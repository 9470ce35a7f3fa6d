"""WebDataset tars in img2dataset's layout: key.png, key.txt, key.json side by side.

The `webdataset` library writes and reads the same files (a test reads them with both). Here they are read with the
standard library's `tarfile`, for three reasons: a damaged tar is reported, where `webdataset` stops without a message;
samples that lack a file are named; nothing in a tar is unpickled, and no address becomes a command (`pipe:`).
"""

import bz2
import glob
import gzip
import itertools
import json
import lzma
import math
import os
import re
import shutil
import string
import tarfile
import tempfile
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import braceexpand

from data.remote.downloads import advice, fetch, is_refused, shown, store_error
from data.sources.base import (
    IMAGE_SUFFIXES,
    MAX_FILE_BYTES,
    ReadOnce,
    Rejected,
    Sample,
    assemble,
    files_matching,
    shard_ids,
    try_again,
)
from data.system.disk_errors import about, disk_error
from data.system.errors import one_line
from data.system.side_by_side import side_by_side

SCHEMES = ("file", "http", "https", "s3", "gs")
MAX_SHARDS = 1_000_000
TIMEOUT = 60.0  # seconds without a byte
FETCHED = "precompose-tar-"  # begins the names of the temporary folders into which tars are fetched
LEFT = 3 * 3600.0  # seconds without a change after which such a folder is a killed process's: all attempts take less

NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
MAX_NAME_BYTES = 1 << 20  # of headers with long names and other notes
MAX_MEMBER_BYTES = 1 << 40  # `tarfile` goes on to skip a member behind the end of the file, a damaged one for ever
HEADER_ERRORS = (ValueError, OverflowError, IndexError, RecursionError, OSError)  # `tarfile` raises them for wild ones
READ_ERRORS = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, *HEADER_ERRORS)

_COMPRESSIONS = ((rb"\x1f\x8b\x08", gzip.open), (rb"BZh.1AY&SY", bz2.open), (rb"\xfd7zXZ|\x5d\0\0\x80", lzma.open))

_MEMBER = re.compile(r"^((?:.*/|)[^./][^./]*)[.]([^/]+)$")  # WebDataset's rule: a key ends at its name's first dot


class TarSource:
    """Local or remote tars. Each tar is one shard."""

    def __init__(self, *, urls: str | list[str], caption: str = "txt") -> None:
        """
        Args:
            urls: paths or addresses (http, https, s3, gs) of tars, with brace ranges ({00000..00041}) and,
                for local ones, wildcards (*.tar). Paths are relative to the current folder.
            caption: suffix of the member that holds the caption, or "json:FIELD" for a field of the JSON
                member.

        Raises:
            FileNotFoundError: a local tar is missing; the message names it.
            ValueError: an address of another kind (`pipe:` and commands are refused), or the same tar twice,
                even if a link leads to it.
        """
        self.caption = caption
        found = list(expand(*([urls] if isinstance(urls, str) else urls)))
        if not found:
            raise ValueError("source.urls is empty: name at least one tar")
        # With the size of a local tar, so that one that was rewritten in another size is another shard. Tars are
        # padded, so the size can stay. The time is left out: a copy would be another shard.
        looked_up = list(side_by_side(_file_and_size, found))
        first: dict[str, str] = {}
        for url, (file, _) in zip(found, looked_up, strict=True):
            if file in first:
                also = "" if first[file] == url else f", also as {url}"
                raise ValueError(f"source.urls names {first[file]} twice{also}: list each tar once")
            first[file] = url
        sizes = [size for _, size in looked_up]
        names = [Path(urllib.parse.urlparse(url).path).name.split(".")[0] for url in found]
        ids = shard_ids(list(zip(names, zip(found, sizes, strict=True), strict=True)))
        self.urls = dict(zip(ids, found, strict=True))

    def shards(self) -> list[str]:
        """One id per tar, in the given order; it changes when the address does, or the size of a local tar."""
        return list(self.urls)

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Samples of one tar, in stored order (see `base.Source.read`). A remote tar is fetched whole first.

        Raises:
            FileNotFoundError: the tar is gone; the message names it.
            ValueError: a remote tar could not be fetched whole, an `Outage` where the server does not answer.
        """
        if shard not in self.urls:
            raise ValueError(f"no shard {shard!r} in this source: it has {len(self.urls)}")
        once = ReadOnce()
        with open_tar(self.urls[shard]) as (file, no_length):
            for group in _groups(file, self.urls[shard], self._is_read, no_length):
                yield once(group if isinstance(group, Rejected) else self._sample(*group))

    def _is_read(self, suffix: str) -> bool:
        """Whether a sample is made of the member of a suffix. Others take no memory: a key may have any number."""
        return suffix in (self.caption, "json") or suffix in IMAGE_SUFFIXES

    def _sample(self, key: str, members: dict[str, bytes | int]) -> Sample | Rejected:
        """Makes a sample of the members of a key: suffix -> bytes, or the size of a member that is too large."""
        images = [suffix for suffix in members if suffix in IMAGE_SUFFIXES]
        has = f"members {', '.join(members)}"
        if len(images) > 1:
            return Rejected(key, "duplicate_image", f"members {', '.join(images)}")
        if not images:
            return Rejected(key, "missing_image", has)
        huge = [f"{suffix}: {data} bytes" for suffix, data in members.items() if isinstance(data, int)]
        if huge:
            return Rejected(key, "too_large_file", ", ".join(huge))
        caption: bytes | str | None = members.get(self.caption)
        if self.caption.startswith("json:"):
            try:
                fields = json.loads(members.get("json", b"{}"))
            except (ValueError, RecursionError) as error:
                return Rejected(key, "broken_metadata", str(error))
            if not isinstance(fields, dict):
                return Rejected(key, "broken_metadata", f"a JSON {type(fields).__name__}, not an object")
            name = self.caption.removeprefix("json:")
            found = fields.get(name)
            if name in fields and not isinstance(found, str):
                kind = "null" if found is None else f"a JSON {type(found).__name__}"
                return Rejected(key, "missing_caption", f"{self.caption} (the source's `caption`) is {kind}, not text")
            caption = found
            has = f"fields {', '.join(fields)}" if fields else has
        if caption is None:
            return Rejected(key, "missing_caption", f"no {self.caption} (the source's `caption`), but {has:.200}")
        return assemble(key, members[images[0]], caption)


def _file_and_size(url: str) -> tuple[str, int | None]:
    """Of a local tar, its path without links and its size in bytes; of a remote one, its address and None."""
    return (url, None) if "://" in url else (os.path.realpath(url), os.stat(url).st_size)


def expand(*urls: str) -> Iterator[str]:
    """Expands the brace ranges of addresses, and the wildcards of local paths.

    Raises:
        FileNotFoundError: a local path that does not exist, or a wildcard that matches nothing.
        ValueError: a scheme that is not read, a web address with a space or a wildcard, a folder, or one brace of two.
    """
    # Of all addresses at once: a list may have 100,000, for each of which a thread would be started.
    for paths in side_by_side(_found, itertools.chain.from_iterable(map(_without_braces, urls))):
        yield from paths


def _without_braces(url: str) -> list[str]:
    """The addresses that the brace ranges of one stand for. Raises as `expand`."""
    # Counted first, because braceexpand holds a whole range in memory, which a typing error could make very large.
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", url)
    if math.prod(abs(int(last) - int(first)) + 1 for first, last in ranges) > MAX_SHARDS:
        raise ValueError(f"source.urls: {url} names over {MAX_SHARDS:,} tars: give a smaller range")
    try:
        return list(braceexpand.braceexpand(url))
    except braceexpand.UnbalancedBracesError:
        raise ValueError(f"source.urls: {url} has one brace of two: write a range as {{00000..00041}}") from None


def _found(one: str) -> list[str]:
    """The tars of an address without braces. Raises as `expand`."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", one)
    if one == "-" or scheme and scheme[1] not in SCHEMES:
        raise ValueError(f"source.urls: {one} is not read: give a path or {', '.join(SCHEMES[1:])} (no commands)")
    if re.match("https?://[^/]*/.*[^!-~]", one):  # the server's name may have other letters
        quoted = urllib.parse.quote(shown(one), safe=string.punctuation)
        raise ValueError(
            f"source.urls: {shown(one)} has spaces or letters that no address has: write them with %, such as {quoted}"
        )
    if scheme and scheme[1] != "file":
        if "*" in shown(one):
            raise ValueError(
                f"source.urls: {shown(one)}: a * stands for names of local files only; name these tars by a brace "
                "range such as {00000..00041}"
            )
        return [one]
    path = urllib.request.url2pathname(urllib.parse.urlparse(one).path) if scheme else os.path.expanduser(one)
    if Path(path).is_file():
        return [path]
    if path and Path(path).is_dir():
        raise ValueError(f"source.urls: {path} is a folder: give its tars, such as {Path(path, '*.tar')}")
    found = sorted(files_matching(path)) if glob.has_magic(path) else []
    if not found:
        raise FileNotFoundError(f"source.urls: no file {path}: check the path and the brace range")
    return found


@contextmanager
def open_tar(url: str) -> Iterator[tuple[BufferedReader, bool]]:
    """Opens a local tar, or a remote one after it was fetched into a temporary file.

    Remote tars are fetched as a whole, because a connection that breaks looks like a tar that ends early. With the file
    comes whether that may be so all the same, because the server gave no length.

    Raises:
        FileNotFoundError: there is no such tar.
        ValueError: a remote one could not be fetched, or what came is none.
    """
    no_length, named = False, nullcontext()
    if not re.match(r"[a-z0-9]+://", url):
        if not Path(url).is_file():
            raise FileNotFoundError(f"no file {url}: a shard of the source is gone")
        file, named = open(url, "rb"), about(Path(url))  # noqa: SIM115 - closed below
    else:
        _remove_left(Path(tempfile.gettempdir()))
        with tempfile.TemporaryDirectory(prefix=FETCHED, ignore_cleanup_errors=True) as folder:  # of NFS
            local = Path(folder) / "shard.tar"
            try:
                no_length = fetch(url, local, TIMEOUT)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"no file {shown(url)} ({one_line(error)})") from None
            except Exception as error:  # each cloud's client has its own errors, without a common base class
                what = advice(error) if is_refused(error) else "start again when the server answers"
                if disk_error(error) is not None:
                    what = f"make room in {tempfile.gettempdir()} (TMPDIR)"
                raise store_error(f"cannot fetch {shown(url)}: {one_line(error)}; {what}", error) from error
            _check_answer(local, url)
            file = open(local, "rb")  # noqa: SIM115 - its name goes now; a killed process leaves nothing behind
    with file, named:
        yield file, no_length


def _check_answer(path: Path, url: str) -> None:
    """Raises ValueError where a server answered with something else, such as a page that asks for a password: unlike a
    damaged tar, it says nothing about the shard, which must not count as done."""
    with open(path, "rb") as file:
        begin = file.peek(40)[:40]
        try:
            tarfile.open(fileobj=_decompressed(file), mode="r|", tarinfo=_CheckedHeader).close()
        except READ_ERRORS as error:
            if try_again(error):
                raise
            raise ValueError(
                f"cannot fetch {shown(url)}: what came is not a tar ({path.stat().st_size:,} bytes, which begin with "
                f"{begin!r}): see whether the address is right and asks for a login"
            ) from None


def _remove_left(temporary: Path) -> None:
    """Removes what killed processes fetched: a job that is pre-empted often would fill the disk."""
    for folder in temporary.glob(f"{FETCHED}*"):
        with suppress(OSError):  # another process was first, or another user owns it
            changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - changed > LEFT:
                shutil.rmtree(folder, ignore_errors=True)


class _CheckedHeader(tarfile.TarInfo):
    """Tells a damaged header from the end of the archive; `tarfile` takes both for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            found = super().fromtarfile(archive)
            if archive.offset - found.offset > MAX_MEMBER_BYTES:
                raise tarfile.InvalidHeaderError("a member that is larger than any file")
            return found
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error or 'no end-of-archive mark'} at byte {archive.offset}") from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        # `tarfile` reads these into memory as a whole, also where a compressed tar grows to gigabytes.
        if self.type in NAMES and not 0 <= self.size <= MAX_NAME_BYTES:
            raise tarfile.InvalidHeaderError(f"a name of {self.size:,} bytes")
        return super()._proc_member(archive)


def _decompressed(file: BufferedReader) -> BinaryIO:
    """A tar's bytes, which may be compressed in several parts (`cat a.tar.gz b.tar.gz`): `tarfile` reads the first."""
    begin = file.peek(10)
    return next((opened(file) for mark, opened in _COMPRESSIONS if re.match(mark, begin, re.DOTALL)), file)


def _groups(
    file: BufferedReader, url: str, is_read: Callable[[str], bool], no_length: bool
) -> Iterator[tuple[str, dict[str, bytes | int]] | Rejected]:
    """Groups neighbouring members of one key, as (key, suffix -> bytes or the size of a member that is too large).

    Of members for whose suffix `is_read` is false, the bytes are left out. With `no_length`, the rejection of a damaged
    tar says that the download may have been cut.
    """
    key, members = "", {}
    try:
        # "r|" reads forward only.
        with tarfile.open(fileobj=_decompressed(file), mode="r|", tarinfo=_CheckedHeader) as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # tarfile would keep every header of the archive
                name = info.name.removeprefix("./")
                if info.isdir() or re.match(r"__[^/]*__($|/)", name):  # WebDataset's mark for notes about the shard
                    continue
                match = _MEMBER.match(name)
                if not info.isreg() or match is None:
                    yield Rejected(name, "unknown_member", "a link or device" if match else "no key.suffix name")
                    continue
                suffix = match[2].lower()
                if match[1] != key or suffix in members:
                    if members:
                        yield key, members
                    key, members = match[1], {}
                if not is_read(suffix):
                    members[suffix] = b""
                else:
                    members[suffix] = info.size if info.size > MAX_FILE_BYTES else archive.extractfile(info).read()
            # `tarfile` ends at the first block of zeros. Joined tars and those with a hole go on behind it.
            while block := archive.fileobj.read(1 << 20):
                if block.strip(b"\0"):
                    raise tarfile.ReadError(f"data after the end-of-archive mark at byte {archive.offset}")
    except READ_ERRORS as error:
        if try_again(error):
            raise
        if members:
            yield key, members
        cut = "; the server gives no length, so the download may have been cut" if no_length else ""
        yield Rejected(Path(shown(url)).name, "broken_shard", f"{error} (after key {key or 'none'}){cut}")
        return
    if members:
        yield key, members
