"""The base classes of frozen encoders, which the encode job, training and sampling share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from data.system.errors import WrongResult
from data.system.log import log
from recipes.encoders.contract import COUNT, FUNCTION, NUMBER, TEXT, check_attributes, check_result, described
from recipes.models.family import NotInDiffusersError
from recipes.models.sampling import DTYPES, Precision

# A local folder, or a hub id of the form owner/name. The config layer checks that it is one of the two.
ModelPath = str


def weights_hash(module: nn.Module) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor of the state dict, sorted by name.

    The module must hold its weights as loaded, before any cast, so that the hash is the same for every precision.
    """

    def digest(item: tuple[str, Tensor]) -> bytes:
        name, tensor = item
        data = tensor.detach().contiguous().cpu()
        head = f"{name}\0{data.dtype}\0{tuple(data.shape)}\0".encode()
        # A view as bytes, because NumPy has no bfloat16.
        return hashlib.sha256(head).digest() + hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy()).digest()

    # hashlib releases the GIL: with a few cores, several GB take about a second.
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(digest, sorted(module.state_dict().items())))
    return hashlib.sha256(b"".join(digests)).hexdigest()


class FrozenEncoder:
    """A frozen network on one device in one precision, with an fp32 copy on demand.

    Attributes:
        needed: what `check_attributes` asks of a subclass, by the names of its attributes.
        id: a readable name: hub id or path, and which part of the model is used.
        weights_hash: see `weights_hash`.
        precision: number format in use: the requested one, except that fp16 becomes fp32 on a CPU.
    """

    needed: ClassVar[dict[str, str]] = {}

    def __init__(self, load: Callable[[], nn.Module], id: str, precision: Precision) -> None:
        """
        Args:
            load: returns the network with its weights as stored, on the CPU. It is called again when the exact weights
                are needed after a cast to half precision.
            id: a readable name.
            precision: number format of inference, from the first call of `to` on.
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

    def check_attributes(self) -> None:
        """Called when a component has built the encoder. Raises as `contract.check_attributes`."""
        check_attributes(self, self.needed)

    def to(self, device: str | torch.device) -> Self:
        """Move to a device and cast to the wanted precision. On a CPU fp16 becomes fp32, which is logged."""
        device = torch.device(device)
        self._exact = None
        if device.type != "cpu":
            self.precision = self._wanted
        elif self._wanted == "bf16":
            self.precision = "bf16"
        elif self.precision == "fp32" and self._wanted == "fp16" and not self._announced:
            log.info(f"{self.id}: fp32 instead of fp16, which is slow on a CPU")
            self._announced = True
        # An fp16 network that comes from a GPU is only kept on the CPU; `_network` loads it again if it is used there.
        # Not `self.module.to`, because diffusers' own `to` warns about this cast.
        self.module = nn.Module.to(self.module, device=device, dtype=DTYPES[self.precision])
        self.device = device
        return self

    def _network(self, exact: bool) -> tuple[nn.Module, torch.dtype]:
        """The network in use and its number format; if `exact`, a network in fp32 with its weights as stored."""
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
        """Change a loaded network before its use. The hash is that of the network before the change."""
        return module


@dataclass
class Stored:
    """What is stored of a batch of images.

    Attributes:
        arrays: (B, ...) by the name of the column, without the resolution.
        finite: bool (B,): whether all values of the sample are finite in the format in which they are stored.
        sums: float64 (B, 3, C), see `precompute.encoding.writer.EncodedSample`; None if there are no statistics.
    """

    arrays: dict[str, Tensor]
    finite: Tensor
    sums: Tensor | None = None


class ImageEncoder(FrozenEncoder, ABC):
    """An encoder of images to latents or tokens, which are stored.

    Attributes:
        kind: latents or tokens, as in the manifest.
        dtype: number format of the stored arrays.
        downsample: image pixels per latent or token, along a side.
    """

    kind: str
    dtype: str
    downsample: int

    def check_attributes(self) -> None:
        """Called when a component has built the encoder. Raises as `contract.check_attributes`."""
        super().check_attributes()
        for base in (LatentEncoder, TokenEncoder):
            for name in ("kind", "dtype") if isinstance(self, base) else ():
                if (value := getattr(self, name)) != getattr(base, name):  # such as a key of its own
                    raise ValueError(
                        f"the attribute `{name}` of {type(self).__name__} ({type(self).__module__}) is {value!r:.60}; "
                        f"it says what is stored, {getattr(base, name)!r}: give yours another name"
                    )

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The manifest's entries about this encoder, besides kind and dtype."""

    @abstractmethod
    def store(self, pixels: Tensor, exact: bool = False) -> Stored:
        """Encode images as they will be stored.

        Args:
            pixels: uint8 (B, N, R, R, 3) on the encoder's device, with N crops of each image.
            exact: compute in fp32 with the weights as stored, whatever the precision in use.
        """

    @abstractmethod
    def reconstruct(self, pixels: Tensor) -> Tensor:
        """What a decoder makes of what is stored: images uint8 (B, R, R, 3) -> float32 (B, 3, R, R) in [0, 1].

        Of latents it takes the mean.
        """


class LatentEncoder(ImageEncoder):
    """An encoder of images to the mean and standard deviation of their latents' posterior, in float16.

    Attributes:
        channels: channels of a latent.
        scaling_factor, shift_factor: normalised latent = (latent - shift) * scaling.
    """

    needed = {"channels": COUNT, "downsample": COUNT, "scaling_factor": NUMBER, "shift_factor": NUMBER}
    kind = "latents"
    dtype = "float16"
    channels: int
    scaling_factor: float
    shift_factor: float
    _deviation_checked = False

    @abstractmethod
    def encode(self, images: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
        """The normalised posterior: (mean - shift) * scaling and deviation * scaling.

        Args:
            images: uint8 (B, 3, H, W) on the encoder's device, H and W multiples of `downsample`.
            exact: compute in fp32 with the weights as stored, whatever the precision in use.

        Returns:
            Mean and standard deviation, float32 (B, channels, H / downsample, W / downsample).
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Images float32 (B, 3, H, W) in [0, 1] of normalised latents (B, channels, h, w)."""

    def facts(self) -> dict[str, Any]:
        """See `ImageEncoder.facts`."""
        return {name: getattr(self, name) for name in ("channels", "downsample", "scaling_factor", "shift_factor")}

    def store(self, pixels: Tensor, exact: bool = False) -> Stored:
        """`mean` and `std` of the only crop, with their statistics. See `ImageEncoder.store`."""
        found = self.encode(channels_first(pixels, 0), exact=exact)
        shape = len(pixels), self.channels, *(side // self.downsample for side in pixels.shape[2:4])
        if not (isinstance(found, tuple | list) and len(found) == 2):
            raise WrongResult(
                f"{type(self).__name__}.encode() returns {described(found)}; "
                "return a tuple of the mean and the deviation"
            )
        for part in found:
            check_result(self, "encode", part, shape, pixels.device)
        if not self._deviation_checked:  # once, as the host waits for a GPU here
            self._deviation_checked = True
            if bool((found[1] < 0).any()):
                raise WrongResult(
                    f"{type(self).__name__}.encode() returns deviations below 0; return the mean and the standard "
                    "deviation, not its logarithm or that of the variance"
                )
        # Copies also where they are in half precision: the job writes them while the encoder is at the next batch, of
        # which the results may be in the same memory.
        mean, std = (part.to(torch.float16, copy=True) for part in found)
        m, s = mean.double().flatten(2), std.double().flatten(2)  # BC(hw), as stored
        sums = torch.stack([m.sum(2), m.square().sum(2), s.square().sum(2)], dim=1)
        return Stored({"mean": mean, "std": std}, sums.isfinite().flatten(1).all(1), sums)

    def reconstruct(self, pixels: Tensor) -> Tensor:
        """See `ImageEncoder.reconstruct`."""
        return self.decode(self.store(pixels[:, None]).arrays["mean"].float())

    def for_diffusers(self) -> nn.Module:
        """An `AutoencoderKL` in fp32 on the CPU whose latents need no shift, which pipelines of diffusers may ignore.

        Raises:
            NotInDiffusersError: diffusers has no such encoder, which is the default.
            ValueError: an encoder that diffusers cannot represent.
        """
        raise NotInDiffusersError(f"diffusers has no pipeline for the image encoder {self.id}")


class TokenEncoder(ImageEncoder):
    """An encoder of images to a grid of codes, in uint16.

    Attributes:
        codes: size of the codebook.
    """

    needed = {"codes": COUNT, "downsample": COUNT}
    kind = "tokens"
    dtype = "uint16"
    codes: int

    @abstractmethod
    def logits(self, images: Tensor, exact: bool = False) -> Tensor:
        """Logits float32 (B, codes, h, w) of images uint8 (B, 3, H, W); `exact` as in `store`."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """Images float32 (B, 3, H, W) in [0, 1] of tokens int64 (B, h, w). Raises as `need_decoder`."""

    @abstractmethod
    def need_decoder(self) -> None:
        """Called before work whose result `decode` will take.

        Raises:
            ValueError: the files hold the encoder alone.
        """

    def facts(self) -> dict[str, Any]:
        """See `ImageEncoder.facts`."""
        return {"downsample": self.downsample, "codes": self.codes}

    def store(self, pixels: Tensor, exact: bool = False) -> Stored:
        """`tokens` (B, N, h * w), the most likely codes in raster order. See `ImageEncoder.store`."""
        tokens, finite = [], torch.ones(len(pixels), dtype=torch.bool, device=pixels.device)
        for crop in range(pixels.shape[1]):  # one after another: the logits of one crop take several GB
            logits = self.logits(channels_first(pixels, crop), exact=exact)
            shape = len(pixels), self.codes, *(side // self.downsample for side in pixels.shape[2:4])
            check_result(self, "logits", logits, shape, pixels.device)
            best, codes = logits.max(dim=1)  # Bhw; NaN wins
            finite &= best.isfinite().flatten(1).all(1)
            tokens.append(codes.flatten(1).int())
        return Stored({"tokens": torch.stack(tokens, dim=1)}, finite)

    def reconstruct(self, pixels: Tensor) -> Tensor:
        """See `ImageEncoder.reconstruct`."""
        tokens = self.store(pixels[:, None]).arrays["tokens"][:, 0].long()
        return self.decode(tokens.unflatten(1, (pixels.shape[1] // self.downsample, -1)))


def channels_first(pixels: Tensor, crop: int) -> Tensor:
    """One of the crops of (B, N, R, R, 3) as a view (B, 3, R, R), which has the channels_last memory format."""
    return pixels[:, crop].permute(0, 3, 1, 2)


def _is_of(library: str, value: object) -> bool:
    """Whether it has a class of a library, or one that inherits from it: those of others of the same methods, such as a
    tokenizer of one's own, are called in other ways."""
    return any(kind.__module__.split(".")[0] == library for kind in type(value).__mro__)


class TextEncoder(FrozenEncoder, ABC):
    """An encoder of captions to one vector per token.

    Attributes:
        length: number of tokens of an embedding.
        width: width of the vector of each token.
        layer: the block whose output is used, after the final layer norm: "last" or "penultimate".
        tokenizer_id: a readable name.
        tokenize: list of captions -> int64 (B, length). It needs no network, so that worker processes can call it.
    """

    needed = {"length": COUNT, "width": COUNT, "layer": TEXT, "tokenizer_id": TEXT, "tokenize": FUNCTION}
    length: int
    width: int
    layer: str
    tokenizer_id: str
    tokenize: Callable[[list[str]], Tensor]

    def check_attributes(self) -> None:
        """Called when a component has built the encoder. Raises as `contract.check_attributes`, and if `tokenize` does
        not return a row of tokens per caption."""
        super().check_attributes()
        found = self.tokenize(["", "a"])
        if not isinstance(found, Tensor) or found.shape != (2, self.length):
            raise ValueError(
                f"{type(self).__name__}.tokenize() ({type(self).__module__}) returns {described(found)} for 2 captions "
                f"instead of an int64 tensor (2, {self.length})"
            )

    def facts(self) -> dict[str, Any]:
        """The manifest's entries about this encoder by which embeddings of equal weights differ. Not `tokenizer`, whose
        name has a class of a library, which other versions of it call differently."""
        return {name: getattr(self, name) for name in ("layer", "length", "width")}

    def encode(self, captions: list[str]) -> Tensor:
        """Embeddings float32 (B, length, width) of captions. The tokenizer cuts captions that are too long.

        As in the encode job, those that overflow in 16 bits are computed in fp32.
        """
        tokens = self.tokenize(captions).to(self.device)
        found = self.embed(tokens)
        overflowed = ~found.isfinite().flatten(1).all(1)
        if self.precision != "fp32" and overflowed.any():
            found[overflowed] = self.embed(tokens[overflowed], exact=True)
        return found

    def lost_tokens(self, captions: list[str]) -> list[int]:
        """How many tokens at the end of each caption the tokenizer cuts; 0 where it does not say how many there are."""
        inner = getattr(self.tokenize, "tokenizer", None)
        if _is_of("transformers", inner):  # which adds the marks itself
            counts = [len(row) for row in inner(captions, verbose=False)["input_ids"]]
        elif _is_of("open_clip", self.tokenize) and hasattr(self.tokenize, "encode"):
            counts = [len(self.tokenize.encode(caption)) + 2 for caption in captions]
        else:
            return [0] * len(captions)
        return [max(0, count - self.length) for count in counts]

    def embed(self, tokens: Tensor, exact: bool = False) -> Tensor:
        """What `encode_tokens` returns, as float32: the model, which gets it in sampling, takes no other number format.

        Raises:
            WrongResult: it is something else than embeddings of these tokens.
        """
        found = self.encode_tokens(tokens, exact=exact)
        check_result(self, "encode_tokens", found, (len(tokens), self.length, self.width), tokens.device)
        return found.float()

    @abstractmethod
    def encode_tokens(self, tokens: Tensor, exact: bool = False) -> Tensor:
        """Embeddings float32 (B, length, width) of tokens int64 (B, length) on the encoder's device.

        `exact` as in `ImageEncoder.store`.
        """

    def for_transformers(self) -> tuple[Any, Any]:
        """transformers' `CLIPTextModel`, in fp32 on the CPU, and its tokenizer. Its `last_hidden_state` is `encode`'s.

        Raises:
            NotInDiffusersError: transformers has no such encoder, which is the default.
            ValueError: an encoder that transformers cannot represent.
        """
        raise NotInDiffusersError(f"diffusers has no pipeline for the text encoder {self.id}")
