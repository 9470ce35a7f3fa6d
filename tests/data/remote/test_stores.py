"""Addresses of stores, and which answers are final. tests/recipes/trial_stores.py runs the clients against servers."""

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import boto3
import pytest
import requests
from botocore.exceptions import ClientError
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from streaming.base.storage import CloudDownloader, CloudUploader
from streaming.base.storage.upload import LocalUploader

from data.encoded.fetching import WholeStream
from data.encoded.sets import EncodedSet, remote_set
from data.remote import downloads
from data.remote.stores import AzureStore, GoogleKeysStore, GoogleStore, S3Store, malformed, open_store
from data.sources.tars import TarSource
from data.system.errors import Outage
from precompute.output.upload import Copy
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.checkpoints.fetched import fetch_newest

AZURE = "azure://pictures.blob.core.windows.net/sets"


@pytest.fixture(autouse=True)
def without_credentials(monkeypatch):
    for name in ("GCS_KEY", "GCS_SECRET", "AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_ACCESS_KEY", "S3_CANNED_ACL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("address", "kind", "bucket", "prefix"),
    [
        ("s3://sets", S3Store, "sets", ""),
        ("s3://sets/a/b/", S3Store, "sets", "a/b/"),
        ("gs://sets/a/b", GoogleStore, "sets", "a/b/"),
        (AZURE, AzureStore, "sets", ""),
        (f"{AZURE}/a/b", AzureStore, "sets", "a/b/"),
    ],
)
def test_an_address_names_a_folder_of_a_store(address, kind, bucket, prefix):
    store = open_store(address)
    assert (type(store), store.bucket, store.prefix) == (kind, bucket, prefix)
    assert malformed(address) is None and all(issubclass(error, Exception) for error in store.errors)


def test_variables_of_the_environment_choose_what_streaming_chooses(monkeypatch):
    assert open_store(AZURE).account == "pictures"
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "other")
    assert open_store(AZURE).account == "other"
    monkeypatch.setenv("GCS_KEY", "key")
    assert type(open_store("gs://sets/a")) is GoogleStore
    monkeypatch.setenv("GCS_SECRET", "secret")
    store = open_store("gs://sets/a")
    assert type(store) is GoogleKeysStore and store.client.meta.endpoint_url == "https://storage.googleapis.com"
    config = store.client.meta.config
    assert config.request_checksum_calculation == config.response_checksum_validation == "when_required"
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:1")
    assert open_store("s3://sets/a").client.meta.endpoint_url == "http://127.0.0.1:1"


def test_an_access_key_of_azure_is_taken_where_there_is_one(monkeypatch):
    assert hasattr(open_store(AZURE)._objects.credential, "get_token")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "a2V5")
    container = open_store(AZURE)._objects
    assert (container.credential.account_key, container.url) == ("a2V5", AZURE.replace("azure:", "https:"))


def test_a_bucket_of_google_is_not_asked_for(monkeypatch):
    """Credentials for objects need not allow that."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials

    monkeypatch.setattr(google.auth, "default", lambda **_: (AnonymousCredentials(), "here"))
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert open_store("gs://sets/a")._objects.name == "sets"


def test_all_pages_of_a_list_are_read():
    """A page has up to 1,000 names, and a sharded checkpoint may have more parts."""
    pages = [{"Contents": [{"Key": "a/1"}]}, {}, {"Contents": [{"Key": "a/2"}, {"Key": "a/3"}]}]
    store = open_store("s3://sets/a")
    store.client = SimpleNamespace(get_paginator=lambda _: SimpleNamespace(paginate=lambda **_: pages))
    assert store.names() == ["1", "2", "3"]


def test_the_canned_acl_that_streaming_takes_is_given_to_each_object(monkeypatch, tmp_path):
    given = []
    store = open_store("s3://sets/a")
    store.client = SimpleNamespace(
        put_object=lambda ACL=None, **_: given.append(ACL),
        upload_file=lambda *_, ExtraArgs: given.append(ExtraArgs.get("ACL")),
    )
    for acl in (None, "bucket-owner-full-control"):
        if acl:
            monkeypatch.setenv("S3_CANNED_ACL", acl)
        store.write("latest.json", b"{}")
        store.upload(tmp_path / "shard.mds", "shard.mds")
    assert given == [None, None, *["bucket-owner-full-control"] * 2]


class Objects(dict):
    """What `data.remote.stores` uses of Google's bucket and of Azure's container: contents by names."""

    def blob(self, name):
        return SimpleNamespace(
            upload_from_string=lambda body: self.update({name: body}),
            upload_from_filename=lambda path: self.update({name: Path(path).read_bytes()}),
            download_as_bytes=lambda: self[name],
            download_to_filename=lambda path: Path(path).write_bytes(self[name]),
            delete=lambda: self.remove(name, answer_of_google(404)),
        )

    def list_blobs(self, prefix):
        return [SimpleNamespace(name=name) for name in self.list_blob_names(prefix)]

    def list_blob_names(self, name_starts_with):
        return [name for name in self if name.startswith(name_starts_with)]

    def upload_blob(self, name, body, overwrite=False):
        assert overwrite or name not in self  # Azure's client raises an error
        self[name] = body if isinstance(body, bytes) else body.read()

    def download_blob(self, name):
        return SimpleNamespace(readall=lambda: self[name], readinto=lambda file: file.write(self[name]))

    def delete_blob(self, name):
        from azure.core.exceptions import ResourceNotFoundError

        self.remove(name, ResourceNotFoundError("no"))

    def remove(self, name, error):
        if self.pop(name, None) is None:
            raise error


@pytest.mark.parametrize("address", ["gs://sets/a", f"{AZURE}/a"])
def test_objects_of_a_folder(address, tmp_path):
    """They are replaced, and of other folders there is none. One that is gone is removed as well: the answer to a first
    attempt may have been lost."""
    store = open_store(address)
    (tmp_path / "shard").write_bytes(b"new")
    store._objects = Objects({"a/latest.json": b"old", "a/ep0/shard": b"old", "ab/latest.json": b"another's"})
    store.write("latest.json", b"new")
    store.upload(tmp_path / "shard", "ep0/shard")
    assert sorted(store.names()) == ["ep0/shard", "latest.json"] and store.names("ep") == ["ep0/shard"]
    store.download("ep0/shard", tmp_path / "copy")
    assert store.read("latest.json") == (tmp_path / "copy").read_bytes() == b"new"
    for _ in range(2):
        store.delete("latest.json")
    assert store._objects == {"a/ep0/shard": b"new", "ab/latest.json": b"another's"}


@pytest.mark.parametrize("address", ["gs://sets/a", f"{AZURE}/a"])
def test_a_refusal_to_remove_an_object_is_an_error_of_the_store(address):
    def refuse(*_):
        raise answer_of_google(403) if address.startswith("gs:") else answer_of_azure(403)

    store = open_store(address)
    store._objects = SimpleNamespace(blob=lambda name: SimpleNamespace(delete=refuse), delete_blob=refuse)
    with pytest.raises(Exception, match="no") as error:
        store.delete("latest.json")
    assert isinstance(error.value, store.errors)


def test_data_that_is_damaged_on_its_way_is_an_error_of_google():
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    assert issubclass(DataCorruption, open_store("gs://sets").errors)
    assert issubclass(InvalidResponse, open_store("gs://sets").errors)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("azure://sets", "give azure://ACCOUNT.blob.core.windows.net/CONTAINER/FOLDER"),
        ("s3:///sets", "give s3://BUCKET/FOLDER"),
        ("gs://", "give gs://BUCKET/FOLDER"),
        ("s3://sets//a", "give it with single slashes, and without ? and #"),
        ("s3://sets/a//", "give it with single slashes, and without ? and #"),
        (f"{AZURE}//a", "give it with single slashes, and without ? and #"),
        ("s3://sets/a?b", "give it with single slashes, and without ? and #"),
        ("s3://sets/a#2", "give it with single slashes, and without ? and #"),
    ],
)
def test_an_address_of_another_form_is_refused(address, problem):
    assert malformed(address, streamed=True) == problem
    with pytest.raises(ValueError, match=re.escape(f"url: {address}; {problem}")):
        remote_set(url=address, cache="cache")


def test_a_set_is_read_from_stores_that_have_a_client():
    with pytest.raises(ValueError, match="url: ftp://host/set: nothing reads from ftp://; give s3://, gs://, oci://"):
        remote_set(url="ftp://host/set", cache="cache")
    for url in ("/sets/train", "oci://sets/train", f"{AZURE}/train", "hf://datasets/a/b/train"):
        assert remote_set(url=url, cache="cache").remote == url


def test_a_data_lake_needs_the_name_of_the_account(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="azure-dl://sets/train: set AZURE_ACCOUNT_NAME"):
        remote_set(url="azure-dl://sets/train", cache="cache")
    with pytest.raises(ValueError, match="azure-dl://sets/train: set AZURE_ACCOUNT_NAME"):
        Copy(tmp_path, "azure-dl://sets/train")
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "pictures")
    assert remote_set(url="azure-dl://sets/train", cache="cache").remote
    assert Copy(tmp_path, "azure-dl://sets/train").address


def test_an_endpoint_that_is_no_url_is_named(monkeypatch, tmp_path):
    """boto3 says only "Invalid endpoint", and when the first object is asked for."""
    monkeypatch.setenv("S3_ENDPOINT_URL", "minio:9000")
    for use in (lambda url: remote_set(url=url, cache="cache"), lambda url: Copy(tmp_path, url), Bucket):
        with pytest.raises(ValueError, match="S3_ENDPOINT_URL is 'minio:9000'; give a URL such as https://minio:9000"):
            use("s3://sets/train")
    assert Bucket("gs://sets/train").address
    for endpoint in ("", "http://minio:9000"):
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        assert Bucket("s3://sets/train").address


def answer_of_azure(status):
    from azure.core.exceptions import HttpResponseError

    error = HttpResponseError("no")
    error.status_code = status
    return error


def answer_of_google(status):
    from google.api_core.exceptions import from_http_status

    return from_http_status(status, "no")


def answer_of_s3(status):
    error = boto3.exceptions.S3UploadFailedError("Failed to upload: no")
    error.__context__ = ClientError({"ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")
    return error


def answer_of_hub(status):
    answer = requests.Response()
    answer.status_code = status
    return HfHubHTTPError("no", response=answer)


@pytest.mark.parametrize("answer", [answer_of_azure, answer_of_google, answer_of_s3, answer_of_hub])
@pytest.mark.parametrize(("status", "asked"), [(404, 1), (403, 1), (429, 2), (503, 2)])
def test_a_store_that_refuses_is_asked_once(answer, status, asked, monkeypatch, tmp_path):
    def download(remote, local, timeout):
        raise answer(status)

    calls = downloader(monkeypatch, download)
    with pytest.raises(ValueError, match="gs://sets/train/manifest.json: cannot be fetched"):
        EncodedSet(str(tmp_path), "gs://sets/train", {}).manifest()
    source = TarSource(urls="gs://sets/0.tar")
    with pytest.raises(ValueError, match="cannot fetch gs://sets/0.tar: .*no") as unread:
        list(source.read(source.shards()[0]))
    assert isinstance(unread.value, Outage) is (asked > 1)
    advice = "start again when the server answers" if asked > 1 else "see whether the address is right and the cred"
    assert advice in str(unread.value)

    def upload(self, path, name):
        calls.append(f"gs://sets/{name}")
        raise answer(status)

    monkeypatch.setattr(GoogleStore, "upload", upload)
    with pytest.raises(ValueError, match="upload: gs://sets cannot be written .*no"):
        Copy(tmp_path, "gs://sets").add(tmp_path, "", ["0.mds"])
    assert calls == [f"gs://sets/{name}" for name in ("train/manifest.json", "0.tar", "0.mds") for _ in range(asked)]


def test_stores_without_a_client_here_get_files_by_streamings(monkeypatch, tmp_path):
    """A folder stands for the store."""
    copy, get = tmp_path / "copy", lambda out, **options: LocalUploader((out[0], f"{copy}/{out[1][6:]}"), **options)
    monkeypatch.setattr(CloudUploader, "get", get)
    (tmp_path / "0.mds").write_text("a shard")
    for place in ("shards/a", ""):
        made = Copy(tmp_path, "oci://sets/train/")
        made.add(tmp_path, place, iter(["0.mds"]))
        assert (copy / "sets" / "train" / place / "0.mds").read_text() == "a shard"
    assert (tmp_path / "0.mds").is_file() and made.has(tmp_path)
    monkeypatch.setattr(CloudUploader, "get", Mock(side_effect=ConnectionError("no answer")))
    with pytest.raises(Outage, match=r"upload: oci://sets/train cannot be written \(no answer\); see whether"):
        made.add(tmp_path, "", ["0.mds"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "upload: gs://sets/options.json: damaged .*; give another `upload`, or remove it"),
        (b"\xff", "upload: gs://sets/options.json: damaged"),
        (ConnectionError("gone"), r"upload: gs://sets/options.json cannot be read \(gone\); see whether the address"),
    ],
)
def test_a_file_of_the_copy_that_cannot_be_read_is_no_missing_one(monkeypatch, tmp_path, content, message):
    def download(remote, local, timeout):
        if isinstance(content, Exception):
            raise content
        Path(local).write_bytes(content)

    downloader(monkeypatch, download)
    with pytest.raises(ValueError, match=message) as error:
        Copy(tmp_path, "gs://sets").read_object("options.json")
    assert isinstance(error.value, Outage) is isinstance(content, ConnectionError)


def test_a_hub_that_does_not_answer_is_an_outage(monkeypatch, tmp_path):
    """The client raises the error of a missing file, as it has no copy either."""

    def download(remote, local, timeout):
        raise LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub")

    calls = downloader(monkeypatch, download)
    with pytest.raises(Outage, match="hf://datasets/a/b/manifest.json: cannot be fetched"):
        EncodedSet(str(tmp_path), "hf://datasets/a/b", {}).manifest()
    assert len(calls) == 2


def test_without_credentials_a_store_is_asked_once_and_the_line_says_what_to_set(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials that an earlier test gave
    pauses = []
    monkeypatch.setattr(downloads.time, "sleep", pauses.append)
    (tmp_path / "index.json").write_text("{}")
    source = TarSource(urls="s3://sets/0.tar")
    for read in (
        lambda: EncodedSet(str(tmp_path), "s3://sets/train", {}).manifest(),
        lambda: list(source.read(source.shards()[0])),
        lambda: fetch_newest(Bucket("s3://sets/run"), tmp_path),
        lambda: Copy(tmp_path, "s3://sets/train").add(tmp_path, "", ["index.json"]),
        lambda: Copy(tmp_path, "s3://sets/train").read_object("options.json"),  # before anything is encoded
    ):
        with pytest.raises(ValueError, match="NoCredentialsError.*; set AWS_ACCESS_KEY_ID") as error:
            read()
        assert "\n" not in str(error.value) and "expired" not in str(error.value)
        assert not isinstance(error.value, Outage)
    assert pauses == []


def test_a_downloader_that_passes_over_an_error_is_an_error(monkeypatch, tmp_path):
    """Google's does so, with the keys of S3's protocol, for nearly all errors."""
    calls = downloader(monkeypatch, lambda remote, local, timeout: None)
    with pytest.raises(ValueError, match="gs://sets/train/manifest.json: cannot be fetched .*no answer that says why"):
        EncodedSet(str(tmp_path), "gs://sets/train", {}).manifest()
    source = TarSource(urls="gs://sets/0.tar")
    with pytest.raises(Outage, match="cannot fetch gs://sets/0.tar: .*no answer that says why"):
        list(source.read(source.shards()[0]))
    options = {"download_retry": 1, "download_timeout": 60.0}
    stream = WholeStream(local=str(tmp_path / "cache"), remote="gs://sets/train", **options)
    with pytest.raises(ConnectionError, match="gs://sets/train/shard.00000.mds: no answer that says why"):
        stream._download_file("shard.00000.mds")
    assert len(calls) == 3 * 2


def downloader(monkeypatch, download):
    """Replaces streaming's downloaders. Returns the addresses that are asked for, each of them twice at most."""
    calls = []

    class Client:
        def download(self, remote, local, timeout):
            calls.append(remote)
            download(remote, local, timeout)

        def clean_up(self):
            pass

    monkeypatch.setattr(downloads, "ATTEMPTS", 2)
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(CloudDownloader, "get", lambda address: Client())
    return calls
