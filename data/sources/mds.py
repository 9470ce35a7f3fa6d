"""MDS shards (mosaicml-streaming) with images and captions, read shard by shard without a process group."""

import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from data.aliases import InputPath
from data.encoded.mds_index import INDEX, read_index
from data.sources.base import MAX_FILE_BYTES, ReadOnce, Rejected, Sample, assemble, shard_ids, try_again
from data.system.memory import MEMORY

_FILES = ("bytes", "jpeg", "png")  # encodings that hold an image's file as it is
_IMAGES = (*_FILES, "pil")
_TEXTS = ("str", "bytes")
_CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}  # as Arrow calls them
_NUMBERS = ("int", *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)))


class MDSSource:
    """A local MDS folder with an index.json; one shard of the folder is one shard here."""

    def __init__(
        self, *, path: InputPath, image: str = "image", caption: str = "caption", key: str | None = None
    ) -> None:
        """
        Args:
            path: the folder that holds index.json.
            image: column of the image, of encoding bytes, jpeg, png or pil.
            caption: column of the caption, of encoding str or bytes.
            key: column of the key; null to make keys of the shard's name and the sample's number.

        Raises:
            FileNotFoundError: no such folder, or no index.json in it.
            ValueError: an index that is not of MDS or damaged (see `read_index`), or a column that is missing or of
                another encoding (pickles are refused).
        """
        self.root = Path(path)
        index = self.root / INDEX
        infos = read_index(self.root)
        files = [info["raw_data"] for info in infos]
        facts = [(file["basename"], info["samples"], file["bytes"]) for file, info in zip(files, infos, strict=True)]
        self.infos = dict(zip(shard_ids(list(zip(map(_stem, infos), facts, strict=True))), infos, strict=True))
        self.image, self.caption, self.key = image, caption, key
        for info in infos:
            self._check(index, info)

    def _check(self, index: Path, info: dict[str, Any]) -> None:
        encodings = dict(zip(info["column_names"], info["column_encodings"], strict=True))
        wanted = {"image": (self.image, _IMAGES), "caption": (self.caption, _TEXTS), "key": (self.key, ("str", "int"))}
        for key, (column, allowed) in wanted.items():
            if column is None:
                continue
            if column not in encodings:
                raise ValueError(f"source.{key}: {index} has no column {column!r}: it has {', '.join(encodings)}")
            if encodings[column] not in allowed:
                kind, read = encodings[column], ", ".join(allowed)
                raise ValueError(f"{index}: column {column!r} is of encoding {kind!r}: read are {read}")

    def shards(self) -> list[str]:
        """One id for each shard of the index."""
        return list(self.infos)

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Samples of one shard, in stored order (see `base.Source.read`).

        Raises:
            FileNotFoundError: the shard's file is gone; the message names it.
        """
        if shard not in self.infos:
            raise ValueError(f"no shard {shard!r} in this source: it has {len(self.infos)}")
        info = self.infos[shard]
        name = _stem(info)
        with tempfile.TemporaryFile(prefix="precompose-") as scratch:
            try:
                file = locate(self.root, info, scratch)
            except FileNotFoundError:
                raise
            except Exception as error:  # each compression library has its own errors
                if try_again(error):
                    raise
                yield Rejected(name, "broken_shard", f"does not decompress: {error}")
                return
            reader, encodings = _reader(file, info)
            size = file.stat().st_size
            with open(file, "rb") as opened:  # np.fromfile takes what the disk does not give for the end of the file
                opened.seek(4)
                begin = opened.read(4 * max(0, min(reader.samples + 1, size // 4 - 1)))
            places = np.frombuffer(begin, np.uint32).astype(np.int64)
            once = ReadOnce()
            for number in range(reader.samples):
                key = f"{name}_{number:08d}"
                if number + 1 >= len(places):  # one line for all that follow, whose number the index may have invented
                    detail = f"{reader.samples - number:,} samples lie outside of the file's {size} bytes"
                    yield Rejected(key, "broken_shard", detail)
                    return
                if not places[number] <= places[number + 1] <= size:
                    # Reading it anyway would give a truncated caption without an error.
                    yield Rejected(key, "broken_shard", f"sample {number} lies outside of the file's {size} bytes")
                    continue
                if places[number + 1] - places[number] > 2 * MAX_FILE_BYTES:
                    yield Rejected(key, "too_large_file", f"{places[number + 1] - places[number]} bytes of all columns")
                    continue
                try:
                    row = reader[number]
                # The offsets of a damaged shard point anywhere, so the library can raise anything.
                except Exception as error:
                    if try_again(error):
                        raise
                    yield Rejected(key, "broken_shard", f"sample {number}: {type(error).__name__}: {error}")
                    continue
                yield once(self._sample(key, row, encodings))

    def _sample(self, key: str, row: dict[str, Any], encodings: dict[str, str]) -> Sample | Rejected:
        if self.key is not None:
            given = row[self.key]
            key = given.decode("utf-8", "replace") if isinstance(given, bytes) else str(given)
        image = row[self.image]
        if encodings[self.image] == "pil":
            from streaming.base.format.mds.encodings import mds_decode

            try:
                _check_pil(image)
                image = mds_decode("pil", image)
            except Exception as error:  # sizes and mode come from the data, so anything may be raised
                if try_again(error):
                    raise
                return Rejected(key, "broken_image", f"{type(error).__name__}: {error}")
        return assemble(key, image, row[self.caption])


def _check_pil(image: bytes) -> None:
    """Width and height come first, and Pillow takes memory for as many pixels, of which a byte holds 8 or fewer.

    Raises:
        ValueError: there are not as many bytes.
    """
    width, height = np.frombuffer(image, np.uint32, 2).tolist()
    if width * height > 8 * len(image):
        raise ValueError(f"it claims {width}x{height} pixels in {len(image)} bytes")


def _stem(info: dict[str, Any]) -> str:
    return PurePosixPath(info["raw_data"]["basename"]).name.removesuffix(".mds")


def locate(root: Path, info: dict[str, Any], scratch: BinaryIO) -> Path:
    """The path of a shard's file. A compressed one is decompressed into `scratch`, which needs no name of its own: a
    killed process leaves nothing behind."""
    file = root / info["raw_data"]["basename"]
    if file.is_file():
        return file
    if not info.get("zip_data"):
        raise FileNotFoundError(f"no file {file}: a shard of the source is gone")
    zipped = root / info["zip_data"]["basename"]
    if not zipped.is_file():
        raise FileNotFoundError(f"no file {zipped}: a shard of the source is gone")
    data = _decompressed(info, zipped)
    scratch.seek(0)
    scratch.truncate()
    scratch.write(data)
    scratch.flush()
    return Path(f"/dev/fd/{scratch.fileno()}")


def _decompressed(info: dict[str, Any], zipped: Path) -> bytes:
    """The bytes of a compressed shard, and never more than the index says: a bomb is not read to its end.

    Raises:
        ValueError: the index says more than this machine's memory, or another size than there is.
    """
    import pyarrow as pa

    size, name = info["raw_data"]["bytes"], info["compression"].split(":")[0]
    if size > MEMORY:
        raise ValueError(f"the index says {size:,} bytes, more than this machine's memory")
    if name not in _CODECS:
        raise ValueError(f"compression {name!r} is not read: give {', '.join(_CODECS)}")
    if name == "snappy":  # not a stream; Arrow needs its size, which it says at its beginning, 7 bits per byte
        stored = zipped.read_bytes()
        last = next((i for i, byte in enumerate(stored[:5]) if byte < 128), 0)
        if sum((byte & 127) << 7 * i for i, byte in enumerate(stored[: last + 1])) != size:
            raise ValueError(f"it does not hold the {size:,} bytes of the index")
        data = pa.Codec(name).decompress(stored, size, asbytes=True)
    else:
        with pa.CompressedInputStream(pa.OSFile(str(zipped)), _CODECS[name]) as stream:
            data = stream.read(size + 1)
    if len(data) != size:
        raise ValueError(f"it holds {'more' if len(data) > size else 'fewer'} than the {size:,} bytes of the index")
    return data


def _reader(file: Path, info: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """streaming's reader of one shard, and the stored encodings by column.

    All columns other than numbers are read as bytes. So an image or a text that does not decode costs one sample only,
    and other columns (pickles, for example) are never decoded.
    """
    from streaming.base.format import reader_from_json

    encodings = dict(zip(info["column_names"], info["column_encodings"], strict=True))
    raw = [kind if kind in _NUMBERS else "bytes" for kind in info["column_encodings"]]
    used = {name: info[name] for name in ("format", "version", "column_names", "column_sizes", "samples")}
    used |= {
        "column_encodings": raw,
        "raw_data": {"basename": file.name, "bytes": info["raw_data"]["bytes"], "hashes": {}},
    }
    unused = {"compression": None, "hashes": [], "size_limit": None, "zip_data": None}
    return reader_from_json(str(file.parent), None, used | unused), encodings
