"""The discrete autoencoder of DALL-E: images to a grid of codes and back. The network, no training.

Ramesh et al. 2021 ("Zero-Shot Text-to-Image Generation"), section 2.1 and appendix A, with the parameter names of the
public release, so that its checkpoints load unchanged.

Letters: B images, R side in pixels, G = R / 8 side of the grid of codes, K codes.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.models.autocast import without_autocast

EPSILON = 0.1  # distance of mapped pixels from 0 and 1, where the logit is infinite
GROUPS = 4
DOWNSAMPLE = 2 ** (GROUPS - 1)


class DVAE(nn.Module):
    """Encoder and decoder, both convolutional ResNets of four groups of bottleneck blocks."""

    def __init__(self, *, codes: int = 8192, hidden: int = 256, blocks: int = 2, initial: int | None = 128) -> None:
        """Build it with new weights. The defaults are the published sizes.

        Args:
            codes: K, the size of the codebook.
            hidden: width of the first encoder group. It doubles in each group; the decoder has the reverse.
            blocks: residual blocks per group.
            initial: width of the decoder's first layer; None: there is no decoder, for tokenising only.

        Raises:
            ValueError: a size out of range.
        """
        super().__init__()
        if codes < 2 or blocks < 1 or initial is not None and initial < 1 or hidden < 4 or hidden % 4:
            raise ValueError(
                f"dvae: codes {codes}, hidden {hidden}, blocks {blocks}, initial {initial}: give at least 2 codes, "
                "1 block and 1 initial channel, and a hidden width that is a multiple of 4"
            )
        self.sizes = {"codes": codes, "hidden": hidden, "blocks": blocks, "initial": initial}
        self.codes = codes
        self.encoder = CodeEncoder(codes, hidden, blocks)
        self.decoder = None if initial is None else CodeDecoder(codes, hidden, blocks, initial)

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
        full_precision: compute in float32 (where TF32 is allowed, in it) even under autocast. FSDP, too, keeps the
            weights in float32.
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
        with without_autocast(x.device):
            return F.conv2d(x.float(), self.w.float(), self.b.float(), padding=padding)


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
