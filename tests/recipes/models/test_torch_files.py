"""Files of torch.save that were made to hurt: PyTorch's own checks would let them reach memory that is not theirs."""

import io
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as metadata_format

from recipes.config.command_line import user_errors
from recipes.engines.checkpoints import plain_pickles as plain
from recipes.engines.checkpoints.plain_pickles import load_plain, plain_metadata, plain_pickles
from recipes.engines.checkpoints.sharded_files import Sharded
from recipes.models import torch_files
from recipes.models.weights import read_tensors
from tests.fuzzing import changed_bytes, few, reads_or_refuses


def records(value) -> dict[str, bytes]:
    """The records of a file of torch.save."""
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return out.getvalue()


def with_pickle(data: bytes) -> bytes:
    """A file whose pickle is `data`."""
    return zipped(records({}) | {"archive/data.pkl": data})


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def larger() -> bytes:
    """A file of a tensor of 16 values that claims to have 64."""
    contents = records({"w": torch.arange(16.0)})
    claims = contents["archive/data.pkl"]
    assert claims.count(b"K\x10") == 2  # of the storage and of the tensor
    return zipped(contents | {"archive/data.pkl": claims.replace(b"K\x10", b"K\x40")})


def every_reader(path):
    yield lambda: read_tensors(path)
    yield lambda: load_plain(path)
    yield lambda: load_plain(io.BytesIO(path.read_bytes()), path)


def write_part(folder, claimed: int | None = None) -> int:
    """A sharded checkpoint of one tensor. Returns the bytes that its metadata claims for it."""
    dcp.save({"w": torch.arange(64.0)}, checkpoint_id=folder, no_dist=True)
    metadata = Sharded.open(folder).metadata
    (info,) = metadata.storage_data.values()
    if claimed is not None:
        object.__setattr__(info, "length", claimed)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return info.length


def test_a_storage_has_no_more_bytes_than_its_record(tmp_path):
    path = tmp_path / "w.pt"
    path.write_bytes(larger())
    for read in every_reader(path):
        with pytest.raises(ValueError, match="w.pt.*it claims 256 bytes in data/0, which has 64"):
            read()


def test_a_part_of_a_sharded_checkpoint_has_no_more_bytes_than_its_record(tmp_path):
    write_part(tmp_path, len(larger()))
    (tmp_path / "__0_0.distcp").write_bytes(larger())
    said = "__0_0.distcp: not readable as a part of a checkpoint: RuntimeError it claims 256 bytes"
    with pytest.raises(ValueError, match=said):
        Sharded.open(tmp_path).values()
    said = f"^{tmp_path}: a part of it is damaged .it claims 256 bytes in data/0, which has 64"
    with pytest.raises(ValueError, match=said), plain_pickles():
        dcp.load({"w": torch.zeros(64)}, checkpoint_id=tmp_path, no_dist=True)


def test_a_part_of_a_sharded_checkpoint_that_cannot_be_read(tmp_path, capsys):
    """PyTorch's own error is a BaseException, which was a traceback."""
    write_part(tmp_path)
    part = tmp_path / "__0_0.distcp"
    part.unlink()

    def said() -> str:
        with pytest.raises(SystemExit), user_errors(), plain_pickles():
            dcp.load({"w": torch.zeros(64)}, checkpoint_id=tmp_path, no_dist=True)
        return capsys.readouterr().err

    assert said() == f"error: {part}: missing; copy the whole folder of the checkpoint\n"
    part.mkdir()
    assert said().startswith(f"error: {part}: Is a directory; a folder has the name of a file")


def test_a_sharded_checkpoint_of_another_model_is_named(tmp_path):
    write_part(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}: not of this model .Missing key"), plain_pickles():
        dcp.load({"v": torch.zeros(64)}, checkpoint_id=tmp_path, no_dist=True)


def test_a_storage_ends_with_its_file(tmp_path):
    """The directory of a zip file can claim as much as the pickle does."""
    contents = records({"w": torch.arange(16.0)})
    huge = b"J" + (1 << 28).to_bytes(4, "little")  # values, of a gigabyte
    changed = zipped(contents | {"archive/data.pkl": contents["archive/data.pkl"].replace(b"K\x10", huge)})
    directory = changed.index(b"PK\x01\x02")
    at = directory + changed[directory:].index(b"archive/data/0") - 46  # the entry of the values
    assert changed[at + 20 : at + 28] == 2 * (64).to_bytes(4, "little")
    path = tmp_path / "w.pt"
    path.write_bytes(changed[: at + 20] + 2 * (1 << 30).to_bytes(4, "little") + changed[at + 28 :])
    for read in every_reader(path):
        with pytest.raises(ValueError, match="w.pt.*failed reading zip archive"):
            read()


def test_a_changed_bit_in_the_place_of_a_record(tmp_path):
    """PyTorch would read a tensor of other bytes."""
    file = tmp_path / "weights.pt"
    torch.save({"w": torch.arange(40.0), "v": torch.ones(40)}, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        record = archive.getinfo("weights/data/0")
        entry = whole.index(b"weights/data/0", archive.start_dir)
    # The length of its header, also by as much as what comes after the record has, and where the header begins.
    for place, bit in ((record.header_offset + 28, 8), (record.header_offset + 28, 16), (entry - 4, 8)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        for read in (*every_reader(file), lambda: load_plain(file, lazily=True)):
            with pytest.raises(ValueError, match=rf"{file}: .*data/0 does not lie where its header says"):
                read()


def test_a_part_that_claims_more_than_its_file(tmp_path):
    """PyTorch's readers take what is there, and so does this one; a lack of memory is not claimed."""
    whole = write_part(tmp_path)
    for length, refused in ((1 << 60, False), (whole - 1, True), (-1, True)):
        write_part(tmp_path, length)
        if refused:
            with pytest.raises(ValueError, match="__0_0.distcp: not readable as a part of a checkpoint"):
                Sharded.open(tmp_path).values()
        else:
            assert torch.equal(Sharded.open(tmp_path).values()["w"], torch.arange(64.0))


def test_values_are_read_to_where_they_stay(tmp_path):
    """A copy on the way would be an object of Python, as large as the tensor."""
    size = 4_000_000
    tensor = torch.arange(size)
    torch.save({"w": tensor}, tmp_path / "w.pt")
    dcp.save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    into = {"w": torch.zeros_like(tensor)}

    def resumed():
        with plain_pickles():
            dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
        return into

    reads = (lambda: read_tensors(tmp_path / "w.pt"), lambda: Sharded.open(tmp_path).values(), resumed)
    tracemalloc.start()
    try:
        for read in reads:
            tracemalloc.reset_peak()
            assert torch.equal(read()["w"], tensor)
            assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@few
@given(st.data())
def test_a_part_of_a_file_is_a_file(data):
    content = data.draw(st.binary(max_size=40))
    start = data.draw(st.integers(0, len(content)))
    size = data.draw(st.integers(0, len(content) - start))
    whole = io.BytesIO(content)
    mine, theirs = torch_files.part_of(whole, start, size), io.BytesIO(content[start : start + size])
    for _ in range(data.draw(st.integers(1, 6))):
        whence = data.draw(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]))
        offset = data.draw(st.integers(0 if whence == io.SEEK_SET else -50, 50))
        assert mine.seek(offset, whence) == theirs.seek(offset, whence) == mine.tell()
        whole.seek(data.draw(st.integers(0, 40)))  # another part of the same file may be read in between
        count = data.draw(st.integers(-1, 50))
        assert mine.read(count) == theirs.read(count)
        buffers = bytearray(9), bytearray(9)
        assert mine.readinto(buffers[0]) == theirs.readinto(buffers[1]) and buffers[0] == buffers[1]


def test_a_file_of_values_may_begin_inside_of_another(tmp_path):
    """As one that a pickle of a stream holds; zip files name places from where they begin."""
    out = io.BytesIO(b"before it")
    out.seek(0, io.SEEK_END)
    torch.save({"w": torch.arange(5.0)}, out)
    out.seek(len(b"before it"))
    assert torch.equal(torch_files.load(out)["w"], torch.arange(5.0))


def test_weights_that_open_clip_fetches_are_checked(tmp_path, monkeypatch):
    from data.tokenizers.clip_library import open_clip
    from recipes.encoders.open_clip_models import load_open_clip

    (tmp_path / "w.bin").write_bytes(larger())
    monkeypatch.setattr(open_clip, "create_model", lambda *_, **__: torch.load(tmp_path / "w.bin", weights_only=True))
    with pytest.raises(ValueError) as raised:
        load_open_clip("ViT-B-32", "laion2b_s34b_b79k", "text_encoder")
    assert "it claims 256 bytes in data/0, which has 64" in str(raised.value.__cause__)


STRUCTURED = (  # np.dtype("u4", False, True) with a field that lies 16 bytes behind the value
    b"cnumpy\ndtype\n" + text("u4") + b"\x89\x88\x87R"
    b"(K\x03" + text("<") + b"N(" + text("a") + b"t}" + text("a") + b"(" + b"cnumpy\ndtype\n" + text("u4")
    + b"\x89\x88\x87RK\x10tsJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)  # fmt: skip
DTYPE, _, STATE = STRUCTURED.partition(b"\x89\x88\x87R(")
SET_BY_PYTORCH = (  # the same by a function of PyTorch, which takes what makes the dtype, its type, and its state
    b"ctorch._tensor\n_rebuild_from_type_v2\n(cnumpy\ndtype\ncnumpy.dtypes\nUInt32DType\n"
    + text("u4") + b"\x89\x88\x87(" + STATE.removesuffix(b"b") + b"tR"
)  # fmt: skip
ARRAY = (
    f"c{np.empty(0).__reduce__()[0].__module__}\n_reconstruct\n".encode()
    + b"cnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
)  # fmt: skip
PLAIN = (
    b"cnumpy\ndtype\n" + text("u4") + b"\x89\x88\x87R"
    b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)  # fmt: skip
VALUES = b"c_codecs\nencode\n" + text("\0" * 16) + text("latin1") + b"\x86R"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02" + STRUCTURED + b".", "it holds a structured dtype of NumPy"),
        (b"\x80\x02" + ARRAY + b"(K\x01K\x04\x85" + PLAIN + b"\x89" + VALUES + b"tbK\x00K\x07s.", "it assigns into"),
        (b"\x80\x02ctorch\nTensor\nK\x04\x85RK\x00K\x07s.", "it assigns into"),
        (b"\x80\x02cdatetime\ntimedelta\nN}" + text("min") + b"K\x00s\x86b.", "it changes a type"),
        (b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n.", "it names torch._utils._rebuild_sparse_tensor"),
        (b"\x80\x02ctorch\n_utils._rebuild_sparse_tensor\n.", "it names torch._utils._rebuild_sparse_tensor"),
        (b"\x80\x02" + SET_BY_PYTORCH + b".", "it names torch._tensor._rebuild_from_type_v2"),
    ],
    ids=["dtype", "array", "tensor", "type", "sparse", "divided name", "dtype by PyTorch"],
)
def test_pickles_that_reach_further_than_their_values(data, message, tmp_path):
    path = tmp_path / "w.pt"
    path.write_bytes(with_pickle(data))
    with pytest.raises(ValueError, match=message):
        load_plain(path)
    assert load_plain(io.BytesIO(with_pickle(b"\x80\x02" + PLAIN + b"."))) == np.uint32


def repeated(times: int) -> bytes:
    """A pickle of lists in lists, each twice in the next one."""
    twice = (b"](h%ch%ce" % (n, n) + b"q%c" % (n + 1) for n in range(times))
    return b"\x80\x02(]q\x00" + b"".join(twice) + b"t."


def bytes_of(value: bytes, encoding: str) -> bytes:
    return b"c_codecs\nencode\n" + value + text(encoding) + b"\x86R"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (repeated(60), "it stands for more than 10,000,000 values"),
        (b"\x80\x02]q\x00h\x00a.", "it stands for more than 10,000,000 values"),
        (b"\x80\x02" + 200 * (b"cbuiltins\nset\n" + text("a" * 2**20) + b"\x85R") + b"N.", "it stands for more than"),
        (b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x00\x85R.", "it makes bytes in another way"),
        (b"\x80\x02" + bytes_of(bytes_of(text("a" * 2**20), "latin1"), "hex") + b".", "it makes bytes in another"),
        (b"\x80\x02\x96\xff\xff\xff\x00\0\0\0\0.", "it holds an operation that torch.save does not write"),
    ],
    ids=["lists", "itself", "left over", "bytearray", "hex", "operation"],
)
def test_small_pickles_that_stand_for_much(data, message, tmp_path):
    path = tmp_path / "w.pt"
    path.write_bytes(with_pickle(data))
    with pytest.raises(ValueError, match=message):
        load_plain(path)


@pytest.mark.parametrize("value", [torch.zeros(1).expand(2**30), torch.zeros(2**16).expand(2**10, -1)])
@pytest.mark.parametrize("lazily", [False, True])
def test_numbers_of_a_checkpoint_that_repeat(value, lazily, tmp_path):
    """A resume copies them to memory of their own."""
    torch.save({"optimizer": {"state": [(value,)]}}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="its tensors are larger than the file"):
        load_plain(tmp_path / "w.pt", lazily=lazily)
    torch.save({"w": torch.zeros(1).expand(2**20)}, tmp_path / "w.pt")
    assert load_plain(tmp_path / "w.pt", lazily=lazily)["w"].shape == (2**20,)


def test_what_checkpoints_hold_is_read(tmp_path):
    value = {"a": [(1, 2.5, None), b"bytes", bytearray(b"\xff"), {"t"}], "state": torch.nn.Linear(2, 2).state_dict()}
    shared = (0.9, 0.999)
    value |= {"groups": [{"betas": shared}, {"betas": shared}], "keys": np.arange(4, dtype=np.uint32)}
    torch.save(value, tmp_path / "w.pt")
    found = load_plain(tmp_path / "w.pt")
    assert (found["a"], found["groups"]) == (value["a"], value["groups"]) and (found["keys"] == value["keys"]).all()
    assert found["state"]._metadata == value["state"]._metadata


def test_records_are_not_decompressed(tmp_path):
    path = tmp_path / "w.pt"
    path.write_bytes(zipped(records({"w": torch.zeros(100_000)}), zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 10_000
    for read in every_reader(path):
        with pytest.raises(ValueError, match="its records are compressed"):
            read()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1).expand(2**40), "its tensors are larger than the file"),
        (torch.zeros(4, 4, device="meta"), "holds more than tensors"),
        (torch.eye(4).to_sparse(), "holds more than tensors"),
    ],
    ids=["expanded", "meta", "sparse"],
)
def test_tensors_that_are_no_weights(tensor, message, tmp_path):
    torch.save({"w": tensor}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=message):
        read_tensors(tmp_path / "w.pt")


def test_tied_and_transposed_tensors_are_weights(tmp_path):
    tied = torch.arange(6.0).view(2, 3)
    torch.save({"one": tied, "two": tied, "three": torch.arange(4.0).view(2, 2).t()}, tmp_path / "w.pt")
    found = read_tensors(tmp_path / "w.pt")
    assert torch.equal(found["two"], tied) and torch.equal(found["three"], torch.tensor([[0.0, 2.0], [1.0, 3.0]]))


def test_a_quantised_tensor_is_not_larger_than_its_storage(tmp_path):
    """PyTorch makes other storages as large as a tensor says that is on them."""
    contents = records({"w": torch.arange(16, dtype=torch.int32)})
    before, between, after = contents["archive/data.pkl"].split(b"K\x10")  # where the sizes of storage and tensor are
    assert b"IntStorage" in before
    changed = before.replace(b"IntStorage", b"QInt32Storage") + b"K\x10" + between + b"K\x40" + after
    path = tmp_path / "w.pt"
    path.write_bytes(zipped(contents | {"archive/data.pkl": changed}))
    for read in every_reader(path):
        with pytest.raises(ValueError, match="w.pt: "):
            read()
    with pytest.raises(ValueError, match="it names torch.QInt32Storage"):
        load_plain(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool])
def test_tensors_of_every_dtype_are_weights(dtype, tmp_path):
    """PyTorch builds the newer dtypes with a function of their own."""
    tensor = torch.tensor([0.0, 1.0, 3.0]).to(dtype)
    torch.save({"w": tensor}, tmp_path / "w.pt")
    for read in every_reader(tmp_path / "w.pt"):
        found = read()["w"]
        assert found.dtype == dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@few
@given(st.data())
def test_whatever_a_pickle_says_of_sizes(tmp_path, data):
    contents = records({"w": torch.arange(16.0), "keys": np.arange(4, dtype=np.uint32)})
    changed = data.draw(changed_bytes(contents["archive/data.pkl"]))
    path = tmp_path / "w.pt"
    path.write_bytes(zipped(contents | {"archive/data.pkl": changed}))
    for read in every_reader(path):
        found = reads_or_refuses(read)
        for value in found.values() if isinstance(found, dict) else ():
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() <= len(contents["archive/data/0"])


# --- the metadata of sharded checkpoints -----------------------------------------------------------------------------


def test_metadata_takes_no_memory_for_an_index_that_it_claims(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x02Nr" + (1 << 24).to_bytes(4, "little") + b".")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it holds a NoneType"):
            plain_metadata(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_metadata_takes_no_memory_for_bytes_that_it_claims(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x05\x96" + (1 << 24).to_bytes(8, "little") + b".")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it holds a bytearray"):
            plain_metadata(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_metadata_changes_no_type(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x02cpathlib\nPosixPath\nN}" + text("of_metadata") + b"K\x01s\x86b.")
    with pytest.raises(ValueError, match="it changes a type"):
        plain_metadata(path)
    assert not hasattr(type(path), "of_metadata")


@pytest.mark.parametrize("name", ["../outside/__0_0.distcp", "/etc/passwd", ".."])
def test_metadata_names_files_of_its_folder_alone(name, tmp_path):
    """PyTorch would read them, and Composer write them, where the checkpoint is in a bucket."""
    folder = tmp_path / "whole"
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=folder, no_dist=True)
    found = plain_metadata(folder / ".metadata")
    assert isinstance(found, metadata_format.Metadata)
    (info,) = found.storage_data.values()
    (tmp_path / "outside").mkdir()
    (folder / info.relative_path).rename(tmp_path / "outside" / "__0_0.distcp")
    object.__setattr__(info, "relative_path", name)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=f"it names the file '{name}', which is not in its folder"):
        plain_metadata(folder / ".metadata")
    with pytest.raises(ValueError, match="which is not in its folder"), plain_pickles():
        dcp.load({"w": torch.zeros(6)}, checkpoint_id=folder, no_dist=True)


def test_metadata_is_read_once_while_a_checkpoint_is_loaded(tmp_path, monkeypatch):
    """Engines look into it before PyTorch does, and that of many ranks is large."""
    read = []
    monkeypatch.setattr(plain, "plain_metadata", lambda path: read.append(path) or plain_metadata(path))
    for name, size in (("one", 4), ("two", 6)):
        dcp.save({"w": torch.arange(float(size))}, checkpoint_id=tmp_path / name, no_dist=True)
    with plain_pickles():
        for name, size in (("one", 4), ("two", 6)):
            reader, into = dcp.FileSystemReader(tmp_path / name), {"w": torch.zeros(size)}
            assert reader.read_metadata().state_dict_metadata["w"].size == (size,)
            dcp.load(into, storage_reader=reader, no_dist=True)
            assert torch.equal(into["w"], torch.arange(float(size)))
    assert read == [tmp_path / name / ".metadata" for name in ("one", "two")]


def test_what_is_checked_is_undone():
    reader = torch._C.PyTorchFileReader
    with torch_files.checked(), torch_files.checked():
        assert torch._C.PyTorchFileReader is torch_files.Reader
    assert torch._C.PyTorchFileReader is reader
