"""Folders of object stores: S3, Google Cloud Storage and Azure Blob Storage, each by its maker's client.

An object appears whole or not at all in each of them. Credentials come from the variables of the environment that
mosaicml-streaming's downloaders take, so what uploads and what streams need the same ones. Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

STORES = ("s3", "gs", "azure")
FORMS = {
    "s3": "s3://BUCKET/FOLDER",
    "gs": "gs://BUCKET/FOLDER",
    "azure": "azure://ACCOUNT.blob.core.windows.net/CONTAINER/FOLDER",
}


def scheme_of(address: str) -> str:
    """What stands before :// in an address; "" for a path."""
    return address.partition("://")[0] if "://" in address else ""


def malformed(address: str, streamed: bool = False) -> str | None:
    """What is wrong with the form of an address, such as `give s3://BUCKET/FOLDER`; None: nothing that is seen here.

    Args:
        address: of a folder.
        streamed: whether mosaicml-streaming reads from it, too.
    """
    scheme = scheme_of(address)
    container = "/[^/]+" if scheme == "azure" else ""
    if re.fullmatch(rf"[a-z0-9-]+://[^/]+{container}(/.*)?", address):
        # It drops such a slash, and takes ? and # for the ends of a path: it would look for other objects.
        odd = streamed and re.search(rf"://[^/]+{container}//|//$|[?#]", address)
        return "give it with single slashes, and without ? and #" if odd else None
    return f"give {FORMS.get(scheme, 'an address such as s3://BUCKET/FOLDER')}"


def check_environment(address: str) -> None:
    """Check what the clients of an address take from the environment, whose own errors do not name the variable.

    Raises:
        ValueError: an address azure-dl:// without the account, or s3:// with an endpoint that is no URL.
    """
    if scheme_of(address) == "azure-dl" and not os.environ.get("AZURE_ACCOUNT_NAME"):
        raise ValueError(f"{address}: set AZURE_ACCOUNT_NAME, the storage account, which such an address does not name")
    endpoint = os.environ.get("S3_ENDPOINT_URL") or "https://"
    if scheme_of(address) == "s3" and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"{address}: S3_ENDPOINT_URL is {endpoint!r}; give a URL such as https://{endpoint}")


def open_store(address: str) -> Store:
    """The folder at an address of one of the schemes `STORES`. Asks nothing of the store."""
    scheme, _, rest = address.rstrip("/").partition("://")
    if scheme == "azure":
        host, container, *folders = rest.split("/")
        return AzureStore(host, container, "/".join(folders))
    bucket, _, folder = rest.partition("/")
    if scheme == "s3":
        return S3Store(bucket, folder)
    if "GCS_KEY" in os.environ and "GCS_SECRET" in os.environ:  # as streaming's downloader chooses
        return GoogleKeysStore(bucket, folder)
    return GoogleStore(bucket, folder)


class Store(ABC):
    """A folder of an object store. Names are those of objects, without the folder.

    All methods raise one of `errors`, or an OSError, when the store refuses something or does not answer.

    Args:
        bucket: its name.
        folder: in the bucket; "": all of it.
    """

    def __init__(self, bucket: str, folder: str) -> None:
        self.bucket = bucket
        self.prefix = folder and f"{folder}/"

    @property
    @abstractmethod
    def errors(self) -> tuple[type[Exception], ...]:
        """The errors of the store's client."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects whose names begin so."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a small object."""

    @abstractmethod
    def write(self, name: str, body: bytes) -> None:
        """Make or replace a small object."""

    @abstractmethod
    def upload(self, path: Path, name: str) -> None:
        """Make or replace an object with the content of a file."""

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Copy an object into a file. After an error, or in a killed process, a part of the file may stay."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""

    def abort_uploads(self, written: Collection[str], own: Callable[[str], bool] = lambda name: False) -> None:
        """Remove what uploads of killed processes left; see `data.remote.multipart`."""
        return  # the stores of Google and of Azure do so by themselves, after a week


class S3Store(Store):
    """A folder of an S3 bucket, or of a store that speaks its protocol, by `S3_ENDPOINT_URL`."""

    @cached_property
    def client(self) -> Any:
        """boto3's client."""
        import boto3
        from botocore.config import Config

        again = Config(retries={"mode": "standard", "max_attempts": 5})
        return boto3.client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL"), config=again)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        return Boto3Error, BotoCoreError, ClientError

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix + prefix)
        return [item["Key"].removeprefix(self.prefix) for page in pages for item in page.get("Contents", [])]

    def read(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"].read()

    @property
    def _rights(self) -> dict[str, str]:
        acl = os.environ.get("S3_CANNED_ACL")  # as streaming's uploader takes it, for buckets of other accounts
        return {"ACL": acl} if acl else {}

    def write(self, name: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=body, **self._rights)

    def upload(self, path: Path, name: str) -> None:
        self.client.upload_file(str(path), self.bucket, self.prefix + name, ExtraArgs=self._rights)

    def download(self, name: str, path: Path) -> None:
        self.client.download_file(self.bucket, self.prefix + name, str(path))

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name)

    def abort_uploads(self, written: Collection[str], own: Callable[[str], bool] = lambda name: False) -> None:
        from data.remote.multipart import abort_uploads

        abort_uploads(self.client, self.bucket, self.prefix, written, own)


class GoogleKeysStore(S3Store):
    """A folder of a bucket of Google Cloud Storage by S3's protocol, with the keys `GCS_KEY` and `GCS_SECRET`."""

    @cached_property
    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        # Google is reported to refuse the checksums that boto3 adds to each upload since its version 1.36.
        config = Config(
            retries={"mode": "standard", "max_attempts": 5},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return boto3.client(
            "s3",
            region_name="auto",
            endpoint_url="https://storage.googleapis.com",
            aws_access_key_id=os.environ["GCS_KEY"],
            aws_secret_access_key=os.environ["GCS_SECRET"],
            config=config,
        )


class GoogleStore(Store):
    """A folder of a bucket of Google Cloud Storage, with Google's Application Default Credentials."""

    @cached_property
    def _objects(self) -> Any:
        from google.auth import default
        from google.cloud.storage import Client

        credentials, project = default()
        # The bucket itself is not asked for: credentials for objects need not allow that.
        return Client(credentials=credentials, project=project).bucket(self.bucket)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

        return GoogleAPIError, GoogleAuthError, DataCorruption, InvalidResponse

    def names(self, prefix: str = "") -> list[str]:
        found = self._objects.list_blobs(prefix=self.prefix + prefix)
        return [item.name.removeprefix(self.prefix) for item in found]

    def read(self, name: str) -> bytes:
        return self._objects.blob(self.prefix + name).download_as_bytes()

    def write(self, name: str, body: bytes) -> None:
        self._objects.blob(self.prefix + name).upload_from_string(body)

    def upload(self, path: Path, name: str) -> None:
        self._objects.blob(self.prefix + name).upload_from_filename(str(path))

    def download(self, name: str, path: Path) -> None:
        self._objects.blob(self.prefix + name).download_to_filename(str(path))

    def delete(self, name: str) -> None:
        from google.api_core.exceptions import NotFound

        with suppress(NotFound):  # the answer to a first attempt may have been lost
            self._objects.blob(self.prefix + name).delete()


class AzureStore(Store):
    """A folder of a container of Azure Blob Storage.

    The access key is `AZURE_ACCOUNT_ACCESS_KEY`. Without it, Azure's command line and default credentials are asked.

    Args:
        host: ACCOUNT.blob.core.windows.net. `AZURE_ACCOUNT_NAME` names another account.
        container: its name.
        folder: in the container; "": all of it.
    """

    def __init__(self, host: str, container: str, folder: str) -> None:
        super().__init__(container, folder)
        self.account = os.environ.get("AZURE_ACCOUNT_NAME") or host.split(".")[0]

    @cached_property
    def _objects(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        key = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY")
        if key is None:
            from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

            key = ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())
        service = BlobServiceClient(f"https://{self.account}.blob.core.windows.net", credential=key)
        return service.get_container_client(self.bucket)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        from azure.core.exceptions import AzureError

        return (AzureError,)

    def names(self, prefix: str = "") -> list[str]:
        found = self._objects.list_blob_names(name_starts_with=self.prefix + prefix)
        return [name.removeprefix(self.prefix) for name in found]

    def read(self, name: str) -> bytes:
        return self._objects.download_blob(self.prefix + name).readall()

    def write(self, name: str, body: bytes) -> None:
        self._objects.upload_blob(self.prefix + name, body, overwrite=True)

    def upload(self, path: Path, name: str) -> None:
        with open(path, "rb") as file:
            self._objects.upload_blob(self.prefix + name, file, overwrite=True)

    def download(self, name: str, path: Path) -> None:
        answer = self._objects.download_blob(self.prefix + name)
        with open(path, "wb") as file:
            answer.readinto(file)

    def delete(self, name: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        with suppress(ResourceNotFoundError):  # the answer to a first attempt may have been lost
            self._objects.delete_blob(self.prefix + name)
