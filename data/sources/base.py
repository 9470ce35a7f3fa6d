"""What every source provides: samples as they are stored, and broken ones rejected with a reason."""

import glob
import hashlib
import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from PIL import Image

from data.system.errors import WrongResult
from data.system.interrupts import raise_lost_interrupt

# Every reason for which a sample can be rejected. `rejected.jsonl` holds no other.
REASONS = {
    "missing_image": "a caption or metadata without an image",
    "missing_caption": "an image without a caption",
    "duplicate_image": "one key with several images",
    "duplicate_key": "the key was read before in the same shard; the first sample stays",
    "unknown_member": "an entry that belongs to no sample (a link, a file without a suffix)",
    "caption_not_utf8": "the caption's bytes are not UTF-8 text",
    "empty_caption": "the caption holds no visible character",
    "short_caption": "fewer characters or words than the filter's min_caption_chars and min_caption_words",
    "long_caption": "more characters than the filter's max_caption_chars",
    "other_letters": "fewer of the caption's letters are a to z than the filter's min_ascii_letters",
    "other_language": "the caption is in another language than the filter's",
    "boilerplate": "the filter's boilerplate matches more of the caption than its max_boilerplate",
    "broken_image": "the image does not decode, or its file ends early",
    "broken_metadata": "the JSON that should hold the caption is not an object",
    "broken_shard": "the shard's file is damaged; what follows this point could not be read",
    "kills_decoder": "a process that decoded the image died, and another one that tried it again",
    "unsupported_image": "an image format or pixel type that is not read (see filters.FORMATS)",
    "too_large_file": "an image's file, a text or the line that holds it is larger than MAX_FILE_BYTES",
    "too_many_pixels": "more pixels than the filter's max_pixels (decompression bombs land here)",
    "too_small": "the shorter side is below the filter's min_side",
    "aspect": "width / height is outside the filter's min_aspect..max_aspect",
    "low_similarity": "the image and its caption fit less well than the source's at_least, by their score",
    "shared_image": "another set has the image, too, by the list of the source (precompute/scores.py --shared)",
    "nonfinite_latent": "the encoder's latents are not finite in fp16, nor when encoded again in fp32",
    "nonfinite_text": "the caption's embedding is not finite in fp16, nor when encoded again in fp32",
}

# Larger files are not read into memory. The largest photographs have a tenth of this.
MAX_FILE_BYTES = 256 * 1024 * 1024

MAX_ID_BYTES = 200  # of a shard, whose folder's name gets a suffix while it is written

LOST = "lost+found"  # at the top of ext4 file systems; can be read by nobody else than root

IMAGE_SUFFIXES = ("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with its caption, as stored.

    Attributes:
        key: unique within its shard.
        image: the encoded file (JPEG, PNG, ...), or an image where the source stores raw pixels.
        caption: as stored, surrounding white space included.
    """

    key: str
    image: bytes | Image.Image
    caption: str


@dataclass(frozen=True, slots=True)
class DecodedSample:
    """A sample that passed the filter.

    Attributes:
        key: as in `Sample`.
        image: uint8 (H, W, 3), RGB, upright. May be smaller than `original_size` (see `Filter.decode`, `shrink_to`).
        caption: without surrounding white space and lone surrogates, never empty.
        original_size: (width, height) in pixels, upright, before any shrinking.
    """

    key: str
    image: np.ndarray
    caption: str
    original_size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected sample: its key, a reason from `REASONS`, and one line of detail."""

    key: str
    reason: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise WrongResult(
                f"the sample {self.key!r} is rejected as {self.reason!r}, which is none of the reasons in "
                f"data/sources/base.py; give one of these, and what else there is to say as `detail`"
            )


@dataclass(frozen=True, slots=True)
class InputShard:
    """One shard of one source.

    Attributes:
        label: the source's label in the config.
        shard: the shard's id in the source.
    """

    label: str
    shard: str


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a sample: its shard, and its number in that shard's order.

    Attributes:
        key: of the sample, where it is known; two positions are equal without it.
    """

    shard: InputShard
    number: int
    key: str = field(default="", compare=False)


@runtime_checkable
class Source(Protocol):
    """A set of images with captions, divided into shards.

    A shard is the unit of work of `precompute/encode.py`, which writes one folder per shard. Shard ids are unique, the
    same in every run, and safe as folder names. Sources can be pickled, so that worker processes can read them.
    """

    def shards(self) -> list[str]:
        """Shard ids, in order. Reads no images."""

    def read(self, shard: str) -> Iterator[Sample | Rejected]:
        """Samples of a shard in stored order. Broken samples are yielded as `Rejected`, not raised or dropped.

        Raises:
            FileNotFoundError: the shard's file does not exist any more.
            OSError: of the disk or the network, which another start may not have (see `try_again`).
            ValueError: the id is unknown, or the file is not of the source's kind.
        """


def shards_of(source: Source) -> list[str]:
    """The ids of a source's shards.

    Raises:
        WrongResult: they are no list of different texts that can be names of folders. Two shards of one name, or one
            outside the folder of the set, would be written over each other, or never be found again.
    """
    shards = source.shards()
    what = f"{type(source).__name__}.shards() returns"
    if not isinstance(shards, list | tuple):
        raise WrongResult(f"{what} {brief(shards)}; return a list of the shards' ids")
    for shard in shards:
        whole = isinstance(shard, str) and shard not in ("", ".", "..") and not {"/", "\0"} & set(shard)
        if not whole or len(shard.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
            raise WrongResult(
                f"{what} the id {brief(shard)}; an id is the name of a folder: return texts without '/', of 1 to "
                f"{MAX_ID_BYTES} bytes, such as data.sources.base.shard_id makes"
            )
    if len(set(shards)) < len(shards):
        shard, count = Counter(shards).most_common(1)[0]
        raise WrongResult(f"{what} the id {shard!r} {count} times; each shard needs an id of its own")
    return list(shards)


def samples_of(source: Source, shard: str) -> Iterator[Sample | Rejected]:
    """The samples of a shard, see `Source.read`.

    Raises:
        WrongResult: what the source yields is no sample. Images of a type that is not read would all be rejected as
            broken.
    """
    samples = source.read(shard)
    if not isinstance(samples, Iterable):
        raise WrongResult(f"{type(source).__name__}.read({shard!r}) returns {brief(samples)}; yield samples")
    for number, sample in enumerate(samples):
        raise_lost_interrupt()
        if (problem := _wrong(sample)) is not None:
            raise WrongResult(f"{type(source).__name__}.read({shard!r}) yields {problem}, as sample {number}")
        yield sample
    raise_lost_interrupt()


def _wrong(sample: object) -> str | None:
    if isinstance(sample, Rejected):
        parts = {"key": (sample.key, str), "detail": (sample.detail, str)}
    elif isinstance(sample, Sample):
        parts = {
            "key": (sample.key, str),
            "image": (sample.image, (bytes, Image.Image)),
            "caption": (sample.caption, str),
        }
    else:
        return f"{brief(sample)} instead of a Sample or a Rejected"
    for name, (value, kind) in parts.items():
        if not isinstance(value, kind):
            wanted = "bytes or an image of Pillow" if name == "image" else "a text"
            return f"a {type(sample).__name__} whose {name} is {brief(value)} instead of {wanted}"
    return None


def brief(value: object) -> str:
    """A wrong value in a few words."""
    known = value is None or isinstance(value, bool | int | float | str)
    return f"{value!r:.60}" if known else f"a value of type {type(value).__name__}"


def rejected_line(shard: str, rejected: Rejected) -> str:
    """One line of `rejected.jsonl`, without the line end: {key, shard, reason, detail}."""
    row = {"key": rejected.key, "shard": shard, "reason": rejected.reason, "detail": rejected.detail}
    # Names inside archives may hold bytes that are not text (lone surrogates), which ASCII escapes can represent.
    return json.dumps(row, ensure_ascii=True)


def shard_id(name: str, *identity: object, digits: int = 8) -> str:
    """An id that is safe as a folder name: a readable part and hex digits of a hash of the shard's identity.

    The digits tell shards of the same name apart. They also prevent an encoded folder from being taken for that of
    another shard after a list of shards was reordered, or a file was replaced by one of another size.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:64] or "shard"
    text = "\0".join(map(str, identity))
    try:
        data = text.encode("utf-8", "surrogateescape")  # names of files that are not UTF-8
    except UnicodeEncodeError:
        data = text.encode("utf-8", "surrogatepass")  # names that no file has, such as "\\ud800" in JSON
    hashed = hashlib.sha256(data).hexdigest()
    return f"{readable}-{hashed[:digits]}"


def shard_ids(shards: Sequence[tuple[str, tuple[object, ...]]]) -> list[str]:
    """The ids of all shards of a source, each from its name and identity. Those that would be the same get more digits.

    Of 100,000 files with one name, as folders of MDS shards hold them, two have the same eight digits more often than
    not, and one of the two would take the place of the other.
    """
    ids = [shard_id(name, *identity) for name, identity in shards]
    counts = Counter(ids)
    return [
        one if counts[one] == 1 else shard_id(name, *identity, digits=16)
        for one, (name, identity) in zip(ids, shards, strict=True)
    ]


def try_again(error: BaseException) -> bool:
    """Whether an error is of the disk, the network or the memory: the shard then stays undone for another start.

    Libraries raise OSErrors without a number for damaged data.
    """
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)


def text_of(value: bytes | str | None) -> str | None:
    """Decodes UTF-8 bytes and drops a byte order mark. None if the bytes are not UTF-8."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def assemble(key: str, image: bytes | Image.Image | None, caption: bytes | str | None) -> Sample | Rejected:
    """Makes a sample of its parts, or rejects it if a part is missing. Every source uses this."""
    if image is None:
        return Rejected(key, "missing_image")
    if caption is None:
        return Rejected(key, "missing_caption")
    text = text_of(caption)
    if text is None:
        return Rejected(key, "caption_not_utf8", repr(caption[:60]))
    if isinstance(image, bytes) and len(image) > MAX_FILE_BYTES:
        return Rejected(key, "too_large_file", f"{len(image)} bytes")
    return Sample(key, image, text)


class ReadOnce:
    """Remembers the keys of a shard and rejects a second sample with the same key."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, sample: Sample | Rejected) -> Sample | Rejected:
        if sample.key in self._seen and (isinstance(sample, Sample) or sample.reason != "broken_shard"):
            return Rejected(sample.key, "duplicate_key")
        self._seen.add(sample.key)
        return sample


def files_below(root: Path) -> Iterator[str]:
    """Names of all files below a folder that are not hidden, relative to it, with "/" between folders.

    Raises:
        OSError: a folder cannot be listed. Without what is in it, a set would be complete all the same.
    """

    def fail(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above itself would never end
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != LOST)
        inside = Path(folder).relative_to(root).as_posix()
        before = "" if inside == "." else f"{inside}/"  # paths as objects take longer than the disk
        for name in sorted(files):
            if not name.startswith("."):
                if "." not in name:  # `os.walk` takes a link to a folder for a file where the disk does not give it
                    Path(folder, name).is_dir()
                yield f"{before}{name}"


def files_matching(pattern: str) -> list[str]:
    """The paths that a pattern matches, as of `glob.glob` with `recursive`, which leaves out what it cannot list
    or enter.

    Raises:
        OSError: as of `files_below`, or a folder may not be entered.
    """
    parts = Path(pattern).parts
    first = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    for number, part in enumerate(parts[first:], start=first):
        folders = [path for path in glob.iglob(str(Path(*parts[:number])), recursive=True) if Path(path).is_dir()]
        if part == "**":
            for folder in folders:
                deque(files_below(Path(folder)), maxlen=0)
            break  # no folder of what follows has not been listed
        for folder in folders:
            if os.path.basename(folder) == LOST:
                continue
            if not glob.has_magic(part):
                Path(folder, part).is_dir()  # fails where the folder may not be entered
                continue
            with os.scandir(folder) as entries:
                deque(entries, maxlen=0)  # a file server that is lost may open a folder, and not give what is in it
    return glob.glob(pattern, recursive=True)
