"""The discrete autoencoder of DALL-E: images to a grid of codes and back. The network and its files, no training.

Ramesh et al. 2021 ("Zero-Shot Text-to-Image Generation"), section 2.1 and appendix A, with the parameter names of the
public release, so that its checkpoints load unchanged.

Letters: B images, R side in pixels, G = R / 8 side of the grid of codes, K codes.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.models.weights import load_tensors, read_tensors

EPSILON = 0.1  # distance of mapped pixels from 0 and 1, where the logit is infinite
GROUPS = 4
DOWNSAMPLE = 2 ** (GROUPS - 1)
KIND = "dvae"
PartTensors = dict[str, tuple[Path, dict[str, Tensor]]]  # encoder and decoder: the file, and its tensors


class DVAE(nn.Module):
    """Encoder and decoder, both convolutional ResNets of four groups of bottleneck blocks."""

    def __init__(self, *, codes: int = 8192, hidden: int = 256, blocks: int = 2, initial: int = 128) -> None:
        """Build it with new weights. The defaults are the published sizes.

        Args:
            codes: K, the size of the codebook.
            hidden: width of the first encoder group. It doubles in each group; the decoder has the reverse.
            blocks: residual blocks per group.
            initial: width of the decoder's first layer.

        Raises:
            ValueError: a size out of range.
        """
        super().__init__()
        if codes < 2 or blocks < 1 or initial < 1 or hidden < 4 or hidden % 4:
            raise ValueError(
                f"dvae: codes {codes}, hidden {hidden}, blocks {blocks}, initial {initial}: give at least 2 codes, "
                "1 block and 1 initial channel, and a hidden width that is a multiple of 4"
            )
        self.sizes = {"codes": codes, "hidden": hidden, "blocks": blocks, "initial": initial}
        self.codes = codes
        self.encoder = CodeEncoder(codes, hidden, blocks)
        self.decoder = CodeDecoder(codes, hidden, blocks, initial)

    def logits(self, pixels: Tensor) -> Tensor:
        """The logits of all codes, (B, K, G, G) float32, of images (B, 3, R, R) in [0, 1].

        Raises:
            ValueError: a side that is not a multiple of 8.
        """
        if pixels.shape[-1] % DOWNSAMPLE or pixels.shape[-2] % DOWNSAMPLE:
            raise ValueError(
                f"dvae: images of {pixels.shape[-2]} x {pixels.shape[-1]} pixels: give sides that are multiples of "
                f"{DOWNSAMPLE}"
            )
        return self.encoder(map_pixels(pixels))

    def tokens(self, pixels: Tensor) -> Tensor:
        """The most likely code at each grid position, (B, G, G) int64, of images (B, 3, R, R) in [0, 1]."""
        return self.logits(pixels).argmax(dim=1)

    def statistics(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The decoder's distribution of pixels.

        Args:
            codes: (B, K, G, G), one-hot or a point of the simplex at each grid position; or (B, G, G) int64, indices
                of codes.

        Returns:
            mu and ln b of the logit-Laplace distribution of mapped pixels, (B, 3, R, R) float32 each.
        """
        mean, log_scale = self.decoder(codes).float().chunk(2, dim=1)
        return mean, log_scale

    def decode(self, tokens: Tensor) -> Tensor:
        """Images (B, 3, R, R) float32 in [0, 1] of codes (B, G, G) int64."""
        return unmap_pixels(torch.sigmoid(self.statistics(tokens)[0]))

    def blocks(self) -> list[nn.Module]:
        """The residual blocks of encoder and decoder, in the order of the forward pass."""
        return [module for module in self.modules() if isinstance(module, Block)]


class Conv(nn.Module):
    """A convolution with "same" padding. Initial weights are N(0, 1 / fan_in), biases 0.

    Attributes:
        full_precision: compute in float32 even under autocast. FSDP, too, keeps the weights in float32.
    """

    def __init__(self, inputs: int, outputs: int, size: int, full_precision: bool = False) -> None:
        super().__init__()
        self.full_precision = full_precision
        self.w = nn.Parameter(torch.empty(outputs, inputs, size, size))
        self.b = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.w, std=1 / math.sqrt(inputs * size**2))

    def forward(self, x: Tensor) -> Tensor:
        padding = self.w.shape[-1] // 2
        if not self.full_precision:
            return F.conv2d(x, self.w, self.b, padding=padding)
        with _no_autocast(x.device.type):
            return F.conv2d(x.float(), self.w.float(), self.b.float(), padding=padding)


def _no_autocast(device: str) -> AbstractContextManager:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()  # meta


class Block(nn.Module):
    """x + f(x) / L^2 with a bottleneck of a quarter of the width; L is the number of blocks of the encoder or decoder.

    The identity path has a 1x1 convolution if the width changes.
    """

    def __init__(
        self, inputs: int, outputs: int, sizes: tuple[int, int, int, int], layers: int, upsample: bool = False
    ) -> None:
        """
        Args:
            inputs: input channels.
            outputs: output channels.
            sizes: kernel sizes of the four convolutions.
            layers: L.
            upsample: double the grid, as if before the block. ReLU and convolutions of size 1 commute with copying
                pixels; before it, they have a quarter of the work.
        """
        super().__init__()
        assert not upsample or sizes[0] == 1
        self.gain = 1 / layers**2
        self.id_path = Conv(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest") if upsample else nn.Identity()
        widths = (inputs, *(outputs // 4,) * 3, outputs)
        path: OrderedDict[str, nn.Module] = OrderedDict()
        for number, size in enumerate(sizes):
            path[f"relu_{number + 1}"] = nn.ReLU()
            path[f"conv_{number + 1}"] = Conv(widths[number], widths[number + 1], size)
            if number == 0:
                path["upsample"] = self.upsample
        self.res_path = nn.Sequential(path)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.upsample(self.id_path(x)), self.res_path(x), alpha=self.gain)


class CodeEncoder(nn.Module):
    """Mapped pixels (B, 3, R, R) to logits (B, K, G, G) float32."""

    def __init__(self, codes: int, hidden: int, blocks: int) -> None:
        super().__init__()
        widths = [hidden * 2**group for group in range(GROUPS)]
        self.blocks = nn.Sequential(
            OrderedDict(
                input=Conv(3, hidden, 7),  # (B, H, R, R)
                **_groups(hidden, widths, blocks, (3, 3, 3, 1)),  # (B, 8H, G, G)
                output=nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=Conv(widths[-1], codes, 1, full_precision=True))),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.to(self.blocks.input.w.dtype))


class CodeDecoder(nn.Module):
    """Codes to mu and ln b of the pixels, (B, 6, R, R). See `CodeConv.forward` for the codes."""

    def __init__(self, codes: int, hidden: int, blocks: int, initial: int) -> None:
        super().__init__()
        widths = [hidden * 2**group for group in reversed(range(GROUPS))]
        self.blocks = nn.Sequential(
            OrderedDict(
                input=CodeConv(codes, initial, 1, full_precision=True),  # (B, I, G, G)
                **_groups(initial, widths, blocks, (1, 3, 3, 3), upsample=True),  # (B, H, R, R)
                output=nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=Conv(widths[-1], 6, 1))),
            )
        )

    def forward(self, codes: Tensor) -> Tensor:
        return self.blocks(codes)


class CodeConv(Conv):
    """The decoder's first convolution, which takes points of the simplex or indices of codes."""

    def forward(self, codes: Tensor) -> Tensor:
        """(B, K, G, G) floating-point or (B, G, G) int64 to (B, I, G, G)."""
        if codes.is_floating_point():
            mixed = super().forward(codes)
        else:  # a 1x1 convolution of one-hot vectors, which would take 33 MB per image at the published size
            mixed = (F.embedding(codes, self.w[:, :, 0, 0].T.float()) + self.b.float()).permute(0, 3, 1, 2)
        # No change with float32 weights, with or without autocast. A network that was cast to 16 bits needs the cast.
        return mixed.to(self.w.dtype)


def _groups(
    inputs: int, widths: list[int], blocks: int, sizes: tuple[int, int, int, int], upsample: bool = False
) -> OrderedDict[str, nn.Module]:
    """group_1 to group_4 of `blocks` residual blocks each. Between groups the grid is halved or doubled."""
    groups: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width in enumerate(widths):
        group: OrderedDict[str, nn.Module] = OrderedDict()
        for block in range(blocks):
            doubled = upsample and number > 0 and block == 0
            group[f"block_{block + 1}"] = Block(inputs, width, sizes, GROUPS * blocks, upsample=doubled)
            inputs = width
        if number < GROUPS - 1 and not upsample:
            group["pool"] = nn.MaxPool2d(2)
        groups[f"group_{number + 1}"] = nn.Sequential(group)
    return groups


def map_pixels(pixels: Tensor) -> Tensor:
    """Pixels from [0, 1] to [eps, 1 - eps], float32, the range that encoder and likelihood take."""
    return (1 - 2 * EPSILON) * pixels.float() + EPSILON


def unmap_pixels(mapped: Tensor) -> Tensor:
    """The inverse of `map_pixels`, clamped to [0, 1]."""
    return ((mapped - EPSILON) / (1 - 2 * EPSILON)).clamp(0, 1)


def save_dvae(network: DVAE, folder: Path) -> None:
    """Write config.json (the sizes), encoder.safetensors and decoder.safetensors, with the public release's names."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("encoder", "decoder"):
        tensors = {name: tensor.contiguous() for name, tensor in getattr(network, part).state_dict().items()}
        save_file(tensors, folder / f"{part}.safetensors")
    (folder / "config.json").write_text(json.dumps({"kind": KIND, **network.sizes}, indent=2), encoding="utf-8")


def load_dvae(folder: Path) -> DVAE:
    """Open a folder that `save_dvae` wrote, or one in the public release's layout.

    The latter has encoder.safetensors and decoder.safetensors, or encoder.pt and decoder.pt: state dicts with names
    such as `blocks.group_1.block_1.res_path.conv_1.w`. The published encoder.pkl and decoder.pkl are pickled programs,
    which are not opened here. docs/dalle.md describes how to extract the tensors from them.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the tensors are not those of a dVAE.
    """
    parts = _read(folder)
    with torch.device("meta"):  # no time, memory or random numbers for initial weights that are replaced
        network = DVAE(**_sizes(folder, parts))
    network.to_empty(device="cpu")
    _fill(network, parts)
    return network.eval()


def load_dvae_into(network: DVAE, folder: Path) -> None:
    """Load the weights of such a folder into a network of the same sizes. Raises as `load_dvae`."""
    _fill(network, _read(folder))


def _fill(network: DVAE, parts: PartTensors) -> None:
    for part, (file, tensors) in parts.items():
        load_tensors(getattr(network, part), tensors, file)


def _read(folder: Path) -> PartTensors:
    return {part: _read_part(folder, part) for part in ("encoder", "decoder")}


def _read_part(folder: Path, part: str) -> tuple[Path, dict[str, Tensor]]:
    for name in (f"{part}.safetensors", f"{part}.pt"):
        if (folder / name).is_file():
            return folder / name, read_tensors(folder / name)
    pickled = (folder / f"{part}.pkl").is_file()
    hint = f"; {part}.pkl is a pickled program: docs/dalle.md says how to convert it" if pickled else ""
    raise FileNotFoundError(f"{folder}: no {part}.safetensors and no {part}.pt of a dVAE{hint}")


def _sizes(folder: Path, parts: PartTensors) -> dict[str, int]:
    """The sizes in config.json if there is one, otherwise those of the tensors."""
    if (folder / "config.json").is_file():
        return _config(folder / "config.json")
    encoder, decoder = parts["encoder"][1], parts["decoder"][1]
    try:
        hidden, colours = encoder["blocks.input.w"].shape[:2]
        initial, codes = decoder["blocks.input.w"].shape[:2]
    except (KeyError, ValueError):
        raise ValueError(f"{folder}: the tensors are not those of a dVAE: no blocks.input.w in both files") from None
    if colours != 3:
        raise ValueError(f"{folder}: encoder and decoder are swapped, or the images have {colours} channels")
    blocks = sum(name.startswith("blocks.group_1.") and name.endswith(".res_path.conv_1.w") for name in encoder)
    return {"codes": codes, "hidden": hidden, "blocks": blocks, "initial": initial}


def _config(file: Path) -> dict[str, int]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise ValueError(f'{file}: is not that of a dVAE, whose "kind" is "{KIND}"')
    sizes = {name: values.get(name) for name in ("codes", "hidden", "blocks", "initial")}
    if not all(type(size) is int for size in sizes.values()):
        raise ValueError(f"{file}: expected whole numbers for {', '.join(sizes)}, got {sizes}")
    return sizes
