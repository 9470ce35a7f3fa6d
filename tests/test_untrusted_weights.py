"""Exports, weights and checkpoints that nobody should trust: they are read, or refused in one line; no code runs."""

import io
import json
import pickle
import shutil
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.encoded.sets import EncodedSet
from tests.fuzzing import Bomb, changed_bytes, changed_json, few, reads_or_refuses, values

# --- exports -----------------------------------------------------------------------------------------------------


@few
@given(st.data())
def test_exports(tmp_path, data):
    from recipes.generation.exports import find_export

    record = {"family": "latent_diffusion", "network": "unet"}
    (tmp_path / "export.json").write_text(json.dumps(data.draw(changed_json(record) | values)))
    reads_or_refuses(find_export, tmp_path)
    (tmp_path / "export.json").write_bytes(data.draw(st.binary(max_size=20)))
    reads_or_refuses(find_export, tmp_path)


@few
@given(st.data())
def test_arrays_of_exports(tmp_path, data):
    out = io.BytesIO()
    np.save(out, np.ones((3, 2), np.float16))
    (tmp_path / "null_text.npy").write_bytes(data.draw(changed_bytes(out.getvalue()) | st.binary(max_size=20)))
    found = reads_or_refuses(EncodedSet(str(tmp_path), None, {}).null_text, (3, 2))
    assert found is None or found.shape == (3, 2)


def test_an_array_that_claims_too_much_and_one_that_is_an_archive(tmp_path):
    out = io.BytesIO()
    np.save(out, np.ones((3, 2), np.float16))
    header = out.getvalue()[:128].replace(b"(3, 2), }" + b" " * 12, b"(300000000000, 2), }"[:21].ljust(21))
    np.savez(tmp_path / "archive.npz", a=np.ones(3))
    for data in (header, (tmp_path / "archive.npz").read_bytes()):
        (tmp_path / "null_text.npy").write_bytes(data)
        for shape in ((3, 2), (300000000000, 2)):
            assert reads_or_refuses(EncodedSet(str(tmp_path), None, {}).null_text, shape) is None


@pytest.mark.parametrize("data", [b"\x00\x3c\r\n" * 3, b"\x00\x3c\r\n\x0a\x3c" * 2])
def test_an_array_with_bytes_too_many_is_not_read(tmp_path, data):
    """A copy as text makes other ends of lines: all numbers behind the first would be others."""
    np.save(tmp_path / "null_text.npy", np.frombuffer(data, np.float16).reshape(-1, 2))
    opened, shape = EncodedSet(str(tmp_path), None, {}), (len(data) // 4, 2)
    assert opened.null_text(shape).numpy().tobytes() == data
    whole = (tmp_path / "null_text.npy").read_bytes()
    for changed in (whole + b"\0", whole[:-11] + whole[-11:].replace(b"\r\n", b"\r\r\n")):
        (tmp_path / "null_text.npy").write_bytes(changed)
        with pytest.raises(ValueError, match=rf"null_text.npy: .*{len(changed)} bytes instead of {len(whole)}.; copy"):
            opened.null_text(shape)


# --- weights and checkpoints -------------------------------------------------------------------------------------


@few
@given(st.data())
def test_files_of_weights(tmp_path, data):
    import torch
    from safetensors.torch import save

    from recipes.models.weights import read_tensors

    tensors = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    (tmp_path / "w.safetensors").write_bytes(data.draw(changed_bytes(save(tensors))))
    reads_or_refuses(read_tensors, tmp_path / "w.safetensors")
    pickled = io.BytesIO()
    torch.save(tensors, pickled)
    (tmp_path / "w.pt").write_bytes(data.draw(changed_bytes(pickled.getvalue())))
    reads_or_refuses(read_tensors, tmp_path / "w.pt")


def test_bombs_in_weights_and_full_checkpoints_do_not_go_off(tmp_path):
    import torch

    from recipes.engines.checkpoints.conversion import read_composer
    from recipes.engines.checkpoints.plain_pickles import load_plain
    from recipes.engines.lightning.checkpoint_format import read_file
    from recipes.models.weights import read_tensors

    path, mark = tmp_path / "ep0-ba1-rank0.pt", tmp_path / "mark"
    for content in (Bomb(mark), {"state": {"timestamp": Bomb(mark)}}, {"format": Bomb(mark)}):
        torch.save(content, path)
        for read in (load_plain, read_composer, read_file, read_tensors):
            with pytest.raises(ValueError):
                read(path)
    path.write_bytes(pickle.dumps(Bomb(mark)))  # and a bare pickle
    for read in (load_plain, read_composer, read_file, read_tensors):
        with pytest.raises(ValueError):
            read(path)
    assert not mark.exists()
    with pytest.raises(FileExistsError):  # the bomb itself works
        mark.mkdir()
        pickle.loads(pickle.dumps(Bomb(mark)))


def test_bombs_in_sharded_checkpoints_do_not_go_off(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    from recipes.engines.checkpoints.conversion import read_parts

    mark = tmp_path / "mark"
    state = {"weights": {"w": torch.arange(6.0), "half": torch.ones(2, dtype=torch.bfloat16)}, "counts": {"batch": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
    found = read_parts(tmp_path / "whole")
    assert found["counts"] == {"batch": 3} and torch.equal(found["weights"]["w"], torch.arange(6.0))

    dcp.save({**state, "extra": Bomb(mark)}, checkpoint_id=tmp_path / "value", no_dist=True)
    with pytest.raises(ValueError, match="not readable as a part of a checkpoint"):
        read_parts(tmp_path / "value")
    (tmp_path / "whole" / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match="not of a checkpoint that this repository wrote"):
        read_parts(tmp_path / "whole")
    assert not mark.exists()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A small sharded checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("sharded") / "whole"
    state = {"weights": {"w": torch.arange(6.0)}, "counts": {"batch": 3}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_sharded_checkpoint_of_another_model_or_larger_than_its_files(sharded):
    import torch
    import torch.distributed.checkpoint as dcp

    from recipes.engines.checkpoints.plain_pickles import plain_pickles
    from recipes.engines.checkpoints.sharded_files import Sharded

    with pytest.raises(ValueError, match=r"not of this model \(Missing key .*weights.other"), plain_pickles():
        dcp.load({"weights": {"other": torch.zeros(6)}}, checkpoint_id=sharded, no_dist=True)
    opened = Sharded.open(sharded)
    opened.metadata.state_dict_metadata["weights.w"].size = torch.Size([2**50])
    with pytest.raises(ValueError, match="weights.w is not complete; it is larger than all files together"):
        opened.nested()
    opened.metadata.state_dict_metadata["weights.w"].size = torch.Size([7])
    with pytest.raises(ValueError, match="weights.w is not complete; the checkpoint lacks a rank's part"):
        opened.nested()
    opened.metadata.planner_data["counts.batch"] = ("counts", 2**50)
    opened.metadata.state_dict_metadata["weights.w"].size = torch.Size([6])
    with pytest.raises(ValueError, match="no list has the places of counts.batch"):
        opened.nested()


@few
@given(st.data())
def test_sharded_checkpoints(sharded, tmp_path, data):
    import torch
    import torch.distributed.checkpoint as dcp

    from recipes.engines.checkpoints.conversion import read_parts
    from recipes.engines.checkpoints.plain_pickles import plain_pickles

    folder = tmp_path / "copy"
    shutil.copytree(sharded, folder, dirs_exist_ok=True)
    name = data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    (folder / name).write_bytes(data.draw(changed_bytes((sharded / name).read_bytes())))
    reads_or_refuses(read_parts, folder)

    def load():
        with plain_pickles():
            dcp.load({"weights": {"w": torch.zeros(6)}}, checkpoint_id=folder, no_dist=True)

    reads_or_refuses(load)


@few
@given(st.data())
def test_the_newest_checkpoint_of_a_bucket(tmp_path, monkeypatch, data):
    from recipes.engines.checkpoints import bucket
    from recipes.engines.checkpoints.fetched import fetch_newest

    good = {"checkpoint": "ep0-ba2.ckpt", "link": "latest", "kept": ["ep0-ba2.ckpt"]}
    text = data.draw(st.one_of(changed_json(good).map(json.dumps), values.map(json.dumps), st.text(max_size=20)))
    objects = {"latest.json": text.encode(), "ep0-ba2.ckpt": b"x"}

    class Store:
        errors = ()

        def names(self, prefix=""):
            return [name for name in objects if name.startswith(prefix)]

        def read(self, name):
            return objects[name]

        def download(self, name, path):
            path.write_bytes(objects[name])

    monkeypatch.setattr(bucket, "open_store", lambda address: Store())
    folder = tmp_path / "deep" / "run"
    shutil.rmtree(folder, ignore_errors=True)
    reads_or_refuses(partial(fetch_newest, bucket.Bucket("s3://b/run")), folder)
    assert {path.parent for path in tmp_path.rglob("*") if not path.is_dir()} <= {folder / "checkpoints"}


@pytest.mark.parametrize(
    ("name", "text"), [("link", ".."), ("checkpoint", ".."), ("link", "ep0-ba1.ckpt"), ("link", "ep0-ba2.ckpt")]
)
def test_a_bucket_names_no_paths_and_no_link_in_the_place_of_a_checkpoint(tmp_path, monkeypatch, name, text):
    from recipes.engines.checkpoints import bucket
    from recipes.engines.checkpoints.fetched import fetch_newest

    latest = {"checkpoint": "ep0-ba2.ckpt", "link": "latest", "kept": [], name: text}

    class Store:
        errors = ()

        def names(self, prefix=""):
            return ["latest.json"]

        def read(self, name):
            return json.dumps(latest).encode()

    monkeypatch.setattr(bucket, "open_store", lambda address: Store())
    with pytest.raises(ValueError, match="latest.json: does not name a checkpoint; remove that object"):
        fetch_newest(bucket.Bucket("s3://b/run"), tmp_path)


def test_the_record_of_a_bucket_is_written_nowhere_else(tmp_path, monkeypatch):
    from recipes.engines.checkpoints import bucket
    from recipes.engines.checkpoints.fetched import fetch_newest

    record = {"config.yaml": "a: 1", "../evil": "x", str(tmp_path / "evil"): "x", "other.txt": "x"}
    latest = {"checkpoint": "ep0-ba2.ckpt", "link": "latest", "kept": [], "record": record}

    class Store:
        errors = ()

        def names(self, prefix=""):
            return [name for name in ("latest.json", "ep0-ba2.ckpt") if name.startswith(prefix)]

        def read(self, name):
            return json.dumps(latest).encode()

        def download(self, name, path):
            path.write_bytes(b"x")

    monkeypatch.setattr(bucket, "open_store", lambda address: Store())
    (tmp_path / "run").mkdir()
    fetch_newest(bucket.Bucket("s3://b/run"), tmp_path / "run")
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if not path.is_dir()}
    written = {"run/config.yaml", "run/records/ep0-ba2/config.yaml", "run/checkpoints/ep0-ba2.ckpt"}
    assert files - {"run/checkpoints/latest"} == written


def test_composer_loads_no_code(tmp_path):
    import torch
    from composer.utils import checkpoint

    from recipes.engines.composer.trainer import own_unpickling

    mark = tmp_path / "mark"
    torch.save({"state": Bomb(mark)}, tmp_path / "c.pt")
    task = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(task.parameters())
    said = "not a checkpoint that this repository wrote: [Uu]nsupported .*GLOBAL"
    with own_unpickling(task, optimizer), pytest.raises(ValueError, match=said):
        checkpoint.safe_torch_load(tmp_path / "c.pt")
    assert not mark.exists()
