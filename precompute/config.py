"""The YAML keys of the encode job and of the vocabulary job. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from data.encoded.mds_index import HASHES
from data.remote.stores import malformed
from data.tokenizers.tokenizer_files import TOKENIZER_FILES
from recipes.config.components import COMPONENTS
from recipes.config.differences import parts_of
from recipes.config.schema import Component, ConfigError, nearest
from recipes.config.values import plain_values

# Image encoders that make tokens, so that a config is checked without importing them; all others make latents.
TOKEN_ENCODERS = ("dvae",)
# Encoders of which no other key changes what is stored than by what is compared anyway: their weights, precision and
# layer. Of others, all keys are compared.
COMPARED_ENCODERS = ("kl_vae", "dvae", "open_clip_text", "hf_clip_text")
# Suffixes of encoders' configs, weights and tokenizers, whose digests a set depends on.
ENCODER_FILES = (".json", ".safetensors", ".pt", ".pth", ".bin", ".txt")

# The client of gs:// and azure:// is in data/remote/stores.py, the others are mosaicml-streaming's. Of these, hf:// and
# dbfs:// are left out: the one fails when it is begun, and the other cannot make folders or replace files.
UPLOADED = ("s3", "gs", "oci", "azure", "azure-dl")
# Of the MDS format.
COMPRESSIONS = re.compile(r"br(:(\d|1[01]))?|bz2(:[1-9])?|gz(:\d)?|snappy|zstd(:([1-9]|1\d|2[0-2]))?", re.ASCII)
# Arguments of sources that say where the data lies and how it is divided, which the ids of shards tell apart; or where
# scores and lists lie, of which the model's weights and the content count (see `_chosen_by`).
PLACES = ("urls", "path", "files", "exclude", "shard_size", "shard_mb", "scores", "shared")
# Options that say what is taken of a source's data (see `source_options`), and by which rules the filter judges (see
# `filter_version`). Sets of earlier versions may lack them, and the keys of encoders.
SOURCE, SCORES, FILTER_VERSION = "source", "scores", "filter_version"
# The option with the digest of the text encoder's `TOKENIZER_FILES`; sets of earlier versions lack it.
TOKENIZER = "tokenizer_files"
# Options with the keys of encoders other than `COMPARED_ENCODERS`.
IMAGE_ENCODER, TEXT_ENCODER = "image_encoder", "text_encoder"
RESAMPLING = "resampling"
EARLIER_RESAMPLING = "lanczos (of an earlier version)"  # of sets of squares that do not hold how these were resized


@dataclass(kw_only=True)
class EncodeConfig:
    """An encode job: it reads sources of images with captions and writes folders of MDS shards."""

    out: str
    """Local folder of the result; each source gets a folder inside it, which has the source's label as its name."""
    upload: str | None = None
    """Address in an object store for a copy of the result, from which training can stream: s3://, gs://, oci://,
    azure:// or azure-dl://. Each shard is uploaded when it is finished, and the manifest at the end. null: no
    upload."""
    sources: dict[str, Annotated[Any, "source"]]
    """Sources of images with captions, by label (train, val, ...)."""
    filter: Annotated[Any, "filter"] | None = None
    """Which images and captions are encoded; rejected.jsonl lists the rejected ones with a reason. null: all that can
    be read."""
    resolutions: list[int]
    """Sides of the encoded squares, in pixels. Each image is decoded once for all of them."""
    crop: Literal["center", "random", "dvae", "transformer"] = "center"
    """How the square is chosen. center and random: the largest square, at the center or at a random place. dvae and
    transformer: the crops with which DALL-E's two models are trained (see data/crops.py); they need an image encoder
    that makes tokens. Random crops are drawn once per image and crop. They are the same for the same seed and the same
    addresses of the shards of the source."""
    crops: int = 1
    """Number of crops per image that are encoded and stored; training draws one of them each time that it
    reads the sample. More than one needs a random crop and an image encoder that makes tokens."""
    upscale: bool = False
    """Whether to enlarge images that are smaller than the largest resolution; false rejects them as too_small."""
    image_encoder: Annotated[Any, "image_encoder"]
    """The encoder of the images."""
    text_encoder: Annotated[Any, "text_encoder"] | None = None
    """The encoder of the captions; null where the image encoder makes tokens: captions are then encoded during
    training."""
    batch: int = 64
    """Images per batch, on each device."""
    workers: int = 8
    """Processes per device that read, decode and resize images; 0 does this in the process of the encoders."""
    prefetch: int = 2
    """Batches that each worker prepares ahead; they are held in shared memory (/dev/shm)."""
    size_limit: str = "64mb"
    """Maximum size of an MDS file before compression, such as 64mb."""
    compression: str | None = None
    """Compression of the MDS files: zstd, gz, br, bz2 or snappy, optionally with a level, such as zstd:7."""
    hashes: list[str] = field(default_factory=lambda: ["xxh3_64"])
    """Checksums of the MDS files in the index, by which `validate_hash` finds damaged files in training."""
    leave_out_unreadable: bool = False
    """Whether the set is completed without input shards that cannot be read. The job still ends with an error that
    names these shards, and tries them again when it is started again. false: the set is completed only when all shards
    have been read."""
    take_over: bool = True
    """Whether a process that has finished its share of the input shards goes on with shards that other processes have
    not begun. Without effect with `upload`."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: the GPU with the number of this process on its machine, or the CPU where there is no GPU."""
    seed: int = 17
    """Seed of the random crops."""

    def __post_init__(self) -> None:
        self.filter = self.filter or default_filter()
        self.out = os.path.expanduser(self.out)
        errors = []

        def require(holds: bool, message: str) -> None:
            if not holds:
                errors.append(message)

        sizes = self.resolutions
        require(bool(self.out), "out: empty; give a folder")
        require("://" not in self.out, f"out: {self.out} is remote; give a local folder, and the address as `upload`")
        remote = self.upload is None or re.fullmatch(r"[a-z0-9-]+://[^/].*", self.upload)
        require(bool(remote), f"upload: {self.upload}; give an address such as s3://bucket/folder, or null")
        if remote and self.upload is not None:
            scheme = self.upload.partition("://")[0]
            known = ", ".join(f"{name}://" for name in UPLOADED)
            require(scheme in UPLOADED, f"upload: {self.upload}: nothing uploads to {scheme}://; give {known}, or null")
            form = malformed(self.upload, streamed=True) if scheme in UPLOADED else None
            require(form is None, f"upload: {self.upload}; {form}")
        errors += source_errors(self.sources, "{name: tars, urls: ...}")
        require(bool(sizes) and min(sizes) > 0, f"resolutions: {sizes}; give at least one, in pixels")
        require(len(set(sizes)) == len(sizes), f"resolutions: {sizes} names one twice")
        makes, tokens = self.image_encoder.name, self.kind == "tokens"
        require(
            tokens or self.text_encoder is not None,
            f"text_encoder: missing; `{makes}` makes latents, which need embedded captions",
        )
        require(
            not tokens or self.text_encoder is None,
            f"text_encoder: `{makes}` makes tokens, whose captions are encoded during training; remove it",
        )
        require(
            tokens or self.crop in ("center", "random"),
            f"crop: {self.crop} is for tokens, `{makes}` makes latents; give center or random",
        )
        require(self.crops >= 1, f"crops: {self.crops}; give 1 or more")
        require(tokens or self.crops == 1, f"crops: {self.crops}; `{makes}` makes latents, of one crop per image")
        require(
            self.crop != "center" or self.crops <= 1,
            f"crop: center is the same square for all {self.crops} crops; give a random crop, or crops=1",
        )
        require(self.batch >= 1, f"batch: {self.batch}; give 1 or more")
        require(self.workers >= 0, f"workers: {self.workers}; give 0 or more")
        require(self.seed >= 0, f"seed: {self.seed}; give 0 or more")
        require(self.prefetch >= 1, f"prefetch: {self.prefetch}; give 1 or more")
        errors += storage_errors(self.size_limit, self.compression, self.hashes)
        if errors:
            raise ConfigError(errors)

    def options(self) -> dict[str, Any]:
        """Those options that the stored values depend on and that are known without the encoders."""
        crops = {"crops": self.crops} if self.kind == "tokens" else {}
        encoders = {IMAGE_ENCODER: self.image_encoder, TEXT_ENCODER: self.text_encoder}
        return {
            "resolutions": list(self.resolutions),
            "crop": self.crop,
            **crops,
            "upscale": self.upscale,
            RESAMPLING: self.resampling,
            "filter": plain_values(self.filter),
            **filter_version(self.filter),
            "seed": None if self.crop == "center" else self.seed,
            **self._tokenizer_files(),
            **{key: reading(one) for key, one in encoders.items() if one and one.name not in COMPARED_ENCODERS},
        }

    def request(self) -> dict[str, Any]:
        """Everything that determines the encoded values, with digests of the encoders' local files."""
        keys = ["filter", "resolutions", "crop", "upscale", "image_encoder", "text_encoder", "seed"]
        if self.kind == "tokens":
            keys.append("crops")
        values = {key: plain_values(getattr(self, key)) for key in keys}
        encoders = [encoder for encoder in (self.image_encoder, self.text_encoder) if encoder is not None]
        values["files"] = {file: digest for encoder in encoders for file, digest in _digests(encoder).items()}
        return values

    def _tokenizer_files(self) -> dict[str, str]:
        """The option that says by which files of a local folder captions become tokens."""
        found = {} if self.text_encoder is None else _digests(self.text_encoder, TOKENIZER_FILES)
        texts = "".join(f"{Path(file).name} {digest}\n" for file, digest in found.items())
        return {TOKENIZER: hashlib.sha256(texts.encode()).hexdigest()[:12]} if found else {}

    @property
    def resampling(self) -> str | None:
        """How squares are resized, see `data.transforms`; None for DALL-E's crops, which are averaged by definition."""
        return "bicubic" if self.crop in ("center", "random") else None

    @property
    def kind(self) -> str:
        """What the image encoder makes: "latents" or "tokens"."""
        return "tokens" if self.image_encoder.name in TOKEN_ENCODERS else "latents"


@dataclass(kw_only=True)
class VocabularyConfig:
    """A vocabulary job: it trains a BPE vocabulary on captions or texts and writes a file of the tokenizers library."""

    out: str
    """File of the result, such as runs/mine/vocabulary.json; its manifest is written beside it."""
    sources: dict[str, Annotated[Any, "source"]]
    """Sources of text files, or of images with captions, by label; images are not read. Leave validation sets out."""
    filter: Annotated[Any, "filter"] | None = None
    """Which texts are used, as in the encode job; null: all that can be read."""
    entries: int = 16384
    """Number of entries, the 256 bytes included. It is an error if the texts give fewer."""
    limit: int | None = None
    """Maximum number of texts, read from shards in random order; null reads all."""
    seed: int = 17
    """Seed of the random order in which shards are read."""

    def __post_init__(self) -> None:
        self.filter = self.filter or default_filter()
        self.out = os.path.expanduser(self.out)
        errors = []
        if "://" in self.out or not self.out.endswith(".json"):
            errors.append(f"out: {self.out}; give a local file that ends in .json")
        if not self.sources:
            errors.append("sources: empty; name at least one, such as train: {name: tars, urls: ...}")
        if self.entries <= 256:
            errors.append(f"entries: {self.entries}; give more than 256, which is the number of the bytes alone")
        if self.limit is not None and self.limit < 1:
            errors.append(f"limit: {self.limit}; give 1 or more, or null for all")
        if errors:
            raise ConfigError(errors)

    def request(self) -> dict[str, Any]:
        """Everything that determines the vocabulary."""
        return {key: plain_values(getattr(self, key)) for key in ("sources", "filter", "entries", "limit", "seed")}


def reading(source: Component) -> dict[str, Any]:
    """The arguments of a source that determine what is read of it, without the places of its files, which may move; of
    an encoder, what determines what it computes, besides its weights."""
    found = {}
    for name, value in parts_of(source).items():
        if isinstance(value, Component):
            found[name] = reading(value)
        elif name not in PLACES:  # a table of captions moves, too
            found[name] = value.rpartition("/")[2] if isinstance(value, str) else plain_values(value)
    return found


def source_options(source: Component) -> dict[str, Any]:
    """The options that say what is taken of a source's data, and by which scores or lists.

    Raises:
        FileNotFoundError: it has not been scored, or its list has not been made.
        ValueError: what is known of its scores is damaged.
    """
    chosen = _chosen_by(source)
    return {SOURCE: reading(source)} | ({SCORES: chosen} if chosen else {})


def filter_version(filter: Component) -> dict[str, Any]:
    """The option that says by which rules of its own a filter judges, of a filter that has a `version`.

    It is no part of `EncodeConfig.request`: a complete encoded set stays complete where the rules have changed. Jobs
    that pack or score compare it of complete sets, too.
    """
    from recipes.config.build import import_builder  # not above: it imports more than the keys need

    version = getattr(import_builder(filter), "version", None)
    return {FILTER_VERSION: version} if isinstance(version, int | str) else {}


def changed_option(found: dict[str, Any], options: dict[str, Any]) -> str | None:
    """The name of the first option that differs from what an earlier job wrote down; None: there is none.

    Args:
        found: the options of that job, from its file.
        options: of this job, as JSON-compatible values.
    """
    # Of versions that did not write them down.
    earlier = [
        name for name in (SOURCE, SCORES, FILTER_VERSION, TOKENIZER, IMAGE_ENCODER, TEXT_ENCODER) if name not in found
    ]
    names = [name for name in [*options, *found] if name not in earlier]
    return next((name for name in names if found.get(name) != options.get(name)), None)


def _chosen_by(source: Component) -> list[str]:
    """Hashes of what a source, and those inside of it, choose pairs by: weights of scoring models, lists of images."""
    found = []
    for value in source.args.values():
        if isinstance(value, Component):
            found += _chosen_by(value)
    if source.name == "scored":
        from data.score_files import FACTS, read_facts  # not above: it imports NumPy

        facts = read_facts(Path(source.args["scores"]))
        if "weights_hash" not in facts:
            raise FileNotFoundError(f"no file {source.args['scores']}/{FACTS}; finish precompute/scores.py first")
        found.append(facts["weights_hash"])
    if source.name == "unshared":
        listed = Path(source.args["shared"])
        if not listed.is_file():
            raise FileNotFoundError(f"no file {listed}; make it with precompute/scores.py --shared")
        found.append(hashlib.sha256(listed.read_bytes()).hexdigest())
    return found


def source_errors(sources: dict[str, Any], example: str) -> list[str]:
    """What is wrong with the sources of a job, one line each: there is none, or a label is not the name of a folder."""
    errors = [] if sources else [f"sources: empty; name at least one, such as train: {example}"]
    for label in sources:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", label):
            errors.append(f"sources.{label}: a label is the name of a folder; use letters, digits and _ . - only")
    return errors


def storage_errors(size_limit: str, compression: str | None, hashes: list[str]) -> list[str]:
    """What is wrong with the keys that say how MDS files are stored, one line each."""
    errors = []
    size = re.fullmatch(r"(\d+)(kb|mb)", size_limit)
    if not (size and 1 << 10 <= int(size[1]) << {"kb": 10, "mb": 20}[size[2]] < 1 << 32):
        errors.append(f"size_limit: {size_limit}; give 1kb to 4095mb, such as 64mb")
    if compression is not None and not COMPRESSIONS.fullmatch(compression):
        errors.append(
            f"compression: {compression}; give null, zstd, gz, br, bz2 or snappy, or with a level, such as zstd:7 "
            "(zstd:1 to 22, gz:0 to 9, br:0 to 11, bz2:1 to 9)"
        )
    for name in sorted(set(hashes) - HASHES):
        errors.append(f"hashes: {name}; {nearest(name, HASHES)}")
    if hashes != sorted(set(hashes)):
        errors.append(f"hashes: {hashes}; sort them, each once")
    return errors


def default_filter() -> Component:
    """The filter that takes all that can be read."""
    return Component("filter", "pictures", {}, COMPONENTS["filter"]["pictures"], "filter")


def _digests(encoder: Component, names: tuple[str, ...] | None = None) -> dict[str, str]:
    """sha256 of the config, weights and tokenizer files in the local folders that an encoder's arguments name, by path;
    only of those with these names, if there are any."""
    texts = [value.removeprefix("local-dir:") for value in encoder.args.values() if isinstance(value, str)]
    roots = [Path(text).expanduser() for text in texts if "/" in text or "." in text]
    files = [root for root in roots if root.is_file()]
    for folder in {root / inner for root in roots for inner in ("", *texts)}:
        if folder.is_dir():
            files += [f for f in folder.iterdir() if f.suffix in ENCODER_FILES and f.is_file()]
    digests = {}
    for file in sorted(file for file in set(files) if names is None or file.name in names):
        with open(file, "rb") as stream:
            digests[str(file)] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests
