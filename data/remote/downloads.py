"""Files of object stores and of HTTP servers, copied to this disk. Imports nothing heavy."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from data.system.disk_errors import disk_error
from data.system.errors import Outage, one_line
from data.system.log import log

if TYPE_CHECKING:
    from streaming.base.storage import CloudDownloader

T = TypeVar("T")
ATTEMPTS = 7  # to copy a file, with pauses of 1, 2, 4, ... 32 s between them: a minute, in which servers restart
LONG = 8.0  # seconds of a pause that is announced
CREDENTIAL = "whether the address is right and the credential has expired"
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")  # of botocore


def fetch(
    address: str, path: Path, timeout: float, attempts: int | None = None, downloader: CloudDownloader | None = None
) -> bool:
    """Copy a file to this disk. After an error there is no file, also where a part of it had come.

    Args:
        address: http://, https://, or one that mosaicml-streaming has a downloader for.
        path: of the copy. A file that is there is replaced.
        timeout: seconds without a byte.
        attempts: how often the file is asked for, with pauses; None: `ATTEMPTS`. After a refusal, or where there are no
            credentials, it is not asked for again.
        downloader: mosaicml-streaming's, which keeps its client for the next file; None: a new one.

    Returns:
        Whether the server gives no length, so that a part of the file would look like all of it.

    Raises:
        FileNotFoundError: some downloaders raise it where there is no such file.
        ConnectionError: no file came, or only a part of it, and there was no error that says why.
        Exception: each store's client has its own errors, without a common base class.
    """
    web = address.startswith(("http://", "https://"))
    if downloader is None and not web:
        from streaming.base.storage import CloudDownloader  # imports torch, so only where a store is read

        downloader = CloudDownloader.get(address)

    def ask() -> bool:
        path.unlink(missing_ok=True)  # downloaders take a file that is there for whole
        try:
            if web:
                return _fetch_http(address, path, timeout)
            downloader.download(address, str(path), timeout)
            if not path.is_file():  # Google's, with the keys of S3's protocol, passes over most errors
                raise ConnectionError(f"{address}: no answer that says why")
            return False
        except Exception:
            path.unlink(missing_ok=True)
            if downloader is not None:
                downloader.clean_up()  # the next attempt makes a new client
            raise

    return ask_again(ask, address, attempts)


def ask_again(ask: Callable[[], T], address: str, attempts: int | None = None) -> T:
    """Call `ask`, which asks a store for something, until it raises no error.

    Args:
        ask: raises an error when the store refuses, or does not answer.
        address: of what is asked for.
        attempts: how often it is called, with pauses; None: `ATTEMPTS`. After a refusal, or where there are no
            credentials, it is not called again.

    Returns:
        What `ask` does.

    Raises:
        Exception: the error of the last call.
    """
    attempts = ATTEMPTS if attempts is None else max(1, attempts)
    for attempt in range(attempts):
        try:
            return ask()
        except Exception as error:
            if attempt + 1 == attempts or is_refused(error):
                raise
            pause = 2.0**attempt
            if pause >= LONG:
                log.info(f"{shown(address)}: {one_line(error)}; asks again in {pause:g} s")
        time.sleep(pause)


def shown(address: str) -> str:
    """An address as logs and messages have it: without a password, and without a query, which may be a signature."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


def without_logins(text: str) -> str:
    """A library's text, without the names and passwords in its addresses."""
    return re.sub(r"(?<=://)[^/?#@\s]*@", "", text)


def _fetch_http(address: str, path: Path, timeout: float) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer, open(path, "wb") as out:
            while block := answer.read(1 << 20):
                out.write(block)
            size = answer.headers.get("Content-Length")
            chunked = answer.chunked
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise FileNotFoundError(f"HTTP {error.code}") from None
        raise
    except http.client.HTTPException as error:  # not an OSError, unlike time-outs and resets
        raise ConnectionError(f"{type(error).__name__} {error}") from error
    if size is not None and path.stat().st_size != int(size):
        raise ConnectionError(f"{path.stat().st_size} of {size} bytes came")
    return size is None and not chunked


def advice(error: BaseException, otherwise: str = f"see {CREDENTIAL}") -> str:
    """What to do after an error of a store: set the credentials that boto3 has not found, or what `otherwise` says."""
    if lacks_credentials(error):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role"
    return otherwise


def lacks_credentials(error: BaseException) -> bool:
    """Whether boto3 found no credentials, so that it has asked nothing of the store."""
    return type(error).__module__ == "botocore.exceptions" and type(error).__name__ in NO_CREDENTIALS


def store_error(line: str, error: Exception) -> ValueError:
    """What to raise, with `line` as its text, after an error of a store: an `Outage` if asking again may help.

    Args:
        line: says what, where and what to do.
        error: of the store's client, or of this disk.
    """
    refused = is_refused(error) or disk_error(error) is not None
    return ValueError(line) if refused else Outage(line)


def is_refused(error: Exception) -> bool:
    """Whether asking again gives the same: no credentials, a missing file, or a status of HTTP from 400 to 499."""
    if lacks_credentials(error):
        return True
    if type(error).__name__ == "LocalEntryNotFoundError":  # a missing file, but of this disk: the hub did not answer
        return False
    if type(error).__name__ == "S3UploadFailedError":  # of boto3, which leaves the answer to the error before
        error = error.__context__ or error
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # of boto3
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    else:  # of Azure's, of Google's, of Oracle's client, and of urllib; or, in an answer, of the hub's
        names = ("status_code", "code", "status")
        found = (getattr(source, name, None) for source in (error, answer) for name in names)
        status = next((int(value) for value in found if isinstance(value, int)), 0)
    return isinstance(error, FileNotFoundError) or (400 <= status < 500 and status not in (408, 429))
