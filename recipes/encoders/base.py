"""What the encode job, training and sampling need of an encoder, and what all encoders share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

Precision = Literal["fp16", "bf16", "fp32"]

# A local folder, or a hub id of the form owner/name; the config layer checks that it is one of the two.
ModelPath = str

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def weights_hash(module: nn.Module) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor of the state dict, in the order of their names.

    The module must hold its weights as loaded, before any cast: the hash is then the same for every precision.
    """

    def digest(item: tuple[str, Tensor]) -> bytes:
        name, tensor = item
        data = tensor.detach().contiguous().cpu()
        head = f"{name}\0{data.dtype}\0{tuple(data.shape)}\0".encode()
        # A view as bytes: NumPy knows no bfloat16.
        return hashlib.sha256(head).digest() + hashlib.sha256(_bytes_of(data)).digest()

    # hashlib releases the interpreter lock: a file of gigabytes takes about a second on a few cores.
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(digest, sorted(module.state_dict().items())))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _bytes_of(data: Tensor) -> memoryview:
    return memoryview(data.reshape(-1).view(torch.uint8).numpy())


def cannot_load(key: str, name: str, error: Exception) -> ValueError:
    """The error of a model that neither the disk nor the hub gives, in one line."""
    reason = " ".join(str(error).split())
    return ValueError(f"{key}: {name} cannot be loaded: {reason[:300]}")


class Encoder:
    """A frozen network on one device in one precision, with an fp32 copy on demand.

    Attributes:
        id: a name for people: hub id or path, and what was taken of it.
        weights_hash: see `weights_hash`.
        precision: number format in use: the one asked for, but fp32 where fp16 was asked for on a CPU.
    """

    def __init__(self, load: Callable[[], nn.Module], id: str, precision: Precision) -> None:
        """
        Args:
            load: gives the network with its weights as stored, on the CPU. Called a second time where weights are
                needed that a cast to half precision may have spoilt.
            id: a name for people.
            precision: number format of inference, from the first `to` on.
        """
        if precision not in DTYPES:
            raise ValueError(f"precision is {precision!r}: give one of {', '.join(DTYPES)}")
        self.id = id
        self._load = load
        self._wanted = precision
        self._exact: nn.Module | None = None
        self._announced = False
        self.precision = "fp32"
        self.device = torch.device("cpu")
        module = load()
        self.weights_hash = weights_hash(module)
        self.module = self._ready(module)

    def to(self, device: str | torch.device) -> Self:
        """Moves to a device and casts to the wanted precision; on a CPU fp16 becomes fp32, with a printed line."""
        device = torch.device(device)
        self._exact = None
        if device.type != "cpu":
            self.precision = self._wanted
        elif self._wanted == "bf16":
            self.precision = "bf16"
        elif self.precision == "fp32" and self._wanted == "fp16" and not self._announced:
            print(f"{self.id}: fp32 instead of fp16, which is slow on a CPU", flush=True)
            self._announced = True
        # An fp16 network that comes from a GPU is only parked on the CPU; `_network` loads it anew if it is used there.
        # Not `self.module.to`: diffusers' own warns of a cast that is wanted here.
        self.module = nn.Module.to(self.module, device=device, dtype=DTYPES[self.precision])
        self.device = device
        return self

    def _network(self, exact: bool) -> tuple[nn.Module, torch.dtype]:
        """The network and its number format: the one in use, or one in fp32 with weights as stored."""
        if self.device.type == "cpu" and self.precision == "fp16":
            self.module, self.precision = self._ready(self._load()), "fp32"
        if not exact or self.precision == "fp32":
            return self.module, DTYPES[self.precision]
        if self._exact is None:
            self._exact = self._ready(self._load()).to(self.device)
        return self._exact, torch.float32

    def _ready(self, module: nn.Module) -> nn.Module:
        return self._prepare(module).eval().requires_grad_(False).float()

    def _prepare(self, module: nn.Module) -> nn.Module:
        """What is done to a loaded network before its use; the hash is of the whole one."""
        return module


@dataclass
class Stored:
    """What is stored of a batch of pictures.

    Attributes:
        arrays: (B, ...) by the name of the column, without the resolution.
        finite: bool (B,): every value that the encoder gave is finite, in the format that it is stored in.
        sums: float64 (B, 3, C), see `precompute.writer.EncodedSample`; None where there are no statistics.
    """

    arrays: dict[str, Tensor]
    finite: Tensor
    sums: Tensor | None = None


class ImageEncoder(Encoder, ABC):
    """Pictures to what is stored of them.

    Attributes:
        kind: latents or tokens, as the manifest says it.
        dtype: number format that is stored.
        downsample: pixels per latent pixel or token, along a side.
    """

    kind: str
    dtype: str
    downsample: int

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the manifest says of this kind of encoder."""

    @abstractmethod
    def store(self, pixels: Tensor, exact: bool = False) -> Stored:
        """Encodes pictures as they will be stored.

        Args:
            pixels: uint8 (B, N, R, R, 3) on the encoder's device, N crops of each picture.
            exact: in fp32 with weights as stored, whatever the precision in use.
        """


class LatentEncoder(ImageEncoder):
    """Pictures to the mean and deviation of their latents' posterior, in float16.

    Attributes:
        channels: channels of a latent.
        scaling_factor, shift_factor: normalised latent = (latent - shift) * scaling.
    """

    kind = "latents"
    dtype = "float16"
    channels: int
    scaling_factor: float
    shift_factor: float

    @abstractmethod
    def encode(self, images: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
        """The posterior, normalised exactly once: (mean - shift) * scaling and deviation * scaling.

        Args:
            images: uint8 (B, 3, H, W) on the encoder's device, H and W multiples of `downsample`.
            exact: in fp32 with weights as stored, whatever the precision in use.

        Returns:
            Mean and standard deviation, float32 (B, channels, H / downsample, W / downsample).
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures of normalised latents (B, channels, h, w): float32 (B, 3, H, W) in [0, 1]."""

    def facts(self) -> dict[str, Any]:
        """See `ImageEncoder.facts`."""
        return {name: getattr(self, name) for name in ("channels", "downsample", "scaling_factor", "shift_factor")}

    def store(self, pixels: Tensor, exact: bool = False) -> Stored:
        """`mean` and `std` of the only crop, with their statistics; see `ImageEncoder.store`."""
        full_mean, full_std = self.encode(channels_first(pixels, 0), exact=exact)
        mean, std = full_mean.half(), full_std.half()
        m, s = mean.double().flatten(2), std.double().flatten(2)  # BC(hw), as stored
        sums = torch.stack([m.sum(2), m.square().sum(2), s.square().sum(2)], dim=1)
        return Stored({"mean": mean, "std": std}, sums.isfinite().flatten(1).all(1), sums)


class TokenEncoder(ImageEncoder):
    """Pictures to a grid of codes, in uint16.

    Attributes:
        codes: size of the codebook.
    """

    kind = "tokens"
    dtype = "uint16"
    codes: int

    @abstractmethod
    def logits(self, images: Tensor, exact: bool = False) -> Tensor:
        """float32 (B, codes, h, w) of uint8 (B, 3, H, W); `exact` as in `store`."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """Pictures of tokens int64 (B, h, w): float32 (B, 3, H, W) in [0, 1]."""

    def facts(self) -> dict[str, Any]:
        """See `ImageEncoder.facts`."""
        return {"downsample": self.downsample, "codes": self.codes}

    def store(self, pixels: Tensor, exact: bool = False) -> Stored:
        """`tokens` (B, N, h * w), the likeliest codes in raster order; see `ImageEncoder.store`."""
        tokens, finite = [], torch.ones(len(pixels), dtype=torch.bool, device=pixels.device)
        for crop in range(pixels.shape[1]):  # one after another: the logits of one fill gigabytes
            best, codes = self.logits(channels_first(pixels, crop), exact=exact).max(dim=1)  # Bhw; NaN wins
            finite &= best.isfinite().flatten(1).all(1)
            tokens.append(codes.flatten(1).int())
        return Stored({"tokens": torch.stack(tokens, dim=1)}, finite)


def channels_first(pixels: Tensor, crop: int) -> Tensor:
    """One of the crops of (B, N, R, R, 3), seen as (B, 3, R, R), which is the channels-last layout."""
    return pixels[:, crop].permute(0, 3, 1, 2)


class TextEncoder(Encoder, ABC):
    """Captions to one vector per token.

    Attributes:
        length: tokens of an embedding.
        width: numbers per token.
        layer: whose output it is: "last" or "penultimate", in both cases after the final layer norm.
        tokenizer_id: a name for people.
        tokenize: list of captions -> int64 (B, length). Needs no network, so that worker processes can call it.
    """

    length: int
    width: int
    layer: str
    tokenizer_id: str
    tokenize: Callable[[list[str]], Tensor]

    def encode(self, captions: list[str]) -> Tensor:
        """float32 (B, length, width) of captions; longer ones are cut by the tokenizer."""
        return self.encode_tokens(self.tokenize(captions).to(self.device))

    @abstractmethod
    def encode_tokens(self, tokens: Tensor, exact: bool = False) -> Tensor:
        """float32 (B, length, width) of tokens int64 (B, length) on the encoder's device; `exact` as for images."""
