"""What a user is told to do about files of encoded sets that are missing: it depends on what is wrong."""

import errno
import os
from unittest.mock import Mock

import pytest

from data.encoded.dataset import open_loader
from data.encoded.fetching import WholeStream
from data.encoded.sets import remote_set
from data.encoded.shared_names import own_names
from data.latents import LatentDataset
from data.loading import Placement
from data.system.errors import Outage
from recipes.config.command_line import user_errors
from tests.data.encoded.test_dataset import BATCH, write


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("local", r"data: .*local/.*: not there, and the set has no remote address; copy or make the set again"),
        ("store", r"data: [^;]*; see whether the address is right .*"),
        ("outage", r"data: .*: timed out; start again when the store answers, and see .*"),
        ("disk", r"data: .*/cache/\S+: No space left on device; make room there, and start the same command again"),
        ("damage", r"data: .*: Checksum failure: .*; copy or make the set again"),
        ("cache", r"data: .*: the cache has no room for a shard, and none that could be removed; raise cache_limit"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_to_do_about_a_shard_depends_on_what_is_wrong(tmp_path, monkeypatch, workers, problem, said):
    local, store = write(tmp_path / "local", 20), write(tmp_path / "store", 20, 1, hashes=("xxh3_64",))
    with own_names():
        places = {"local": str(tmp_path / "cache"), "remote": str(store), "validate_hash": "xxh3_64"}
        streams = [WholeStream(**places), WholeStream(local=str(local))]
        dataset = LatentDataset(streams=streams, resolution=32, text="text", blocks=6, batch_size=BATCH)
    loader = open_loader(dataset, Placement(BATCH, training=True), workers, drop_last=False)
    if problem == "disk":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr("data.encoded.fetching.fetch", Mock(side_effect=full))
    elif problem == "outage":
        monkeypatch.setattr("data.encoded.fetching.fetch", Mock(side_effect=TimeoutError("timed out")))
    elif problem == "cache":
        dataset.cache_limit = 1  # byte, as where other workers fetch all that the cache has room for
    else:
        for file in (local if problem == "local" else store).glob("*.mds"):
            file.write_bytes(bytes(file.stat().st_size)) if problem == "damage" else file.unlink()
    with pytest.raises(ValueError, match=f"^{said}$") as raised:
        list(loader)
    assert isinstance(raised.value, Outage) == (problem == "outage")  # by which a cluster starts the job again


@pytest.mark.parametrize(("error", "status"), [(TimeoutError("timed out"), 1), (FileNotFoundError("no such key"), 2)])
def test_a_store_that_does_not_answer_is_worth_another_start(tmp_path, monkeypatch, capsys, error, status):
    monkeypatch.setattr("data.encoded.sets.fetch", Mock(side_effect=error))
    with pytest.raises(SystemExit) as left, user_errors():
        remote_set(url=str(tmp_path / "store"), cache=str(tmp_path / "cache")).manifest()
    assert left.value.code == status
    assert f"store/manifest.json: cannot be fetched ({error}); " in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(TimeoutError("timed out"), 1), (FileNotFoundError("no such key"), 2)])
def test_a_store_may_cease_to_answer_between_the_manifest_and_the_index(tmp_path, monkeypatch, capsys, error, status):
    monkeypatch.setattr("data.encoded.fetching.fetch", Mock(side_effect=error))
    streams = [WholeStream(local=str(tmp_path / "cache"), remote="s3://sets/train")]
    with pytest.raises(SystemExit) as left, user_errors():
        LatentDataset(streams=streams, resolution=32, text="text", blocks=0, batch_size=BATCH)
    assert left.value.code == status
    said = f"error: data: s3://sets/train/index.json: cannot be fetched ({error}); "
    assert capsys.readouterr().err.startswith(said)


def test_a_disk_that_is_full_is_no_store_that_refuses_a_manifest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.encoded.sets.fetch", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(SystemExit), user_errors():
        remote_set(url=str(tmp_path / "store"), cache=str(tmp_path / "cache")).manifest()
    said = f"error: {tmp_path}/cache/manifest.json: No space left on device; make room there, and start the same "
    assert capsys.readouterr().err == f"{said}command again\n"
