"""Small networks, pictures, and checkpoints in the layout of the public release."""

import math

import torch
import torch.nn.functional as F

from recipes.models.dvae.network import DVAE

SIZES = {"codes": 24, "hidden": 8, "blocks": 2, "initial": 5}


def small(seed=0, **changes):
    torch.manual_seed(seed)
    return DVAE(**(SIZES | changes))


def pictures(count=2, side=16, seed=3):
    """(B, 3, R, R) in [0, 1]: patches of 8 x 8 of a colour each, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, -(-side // 8), -(-side // 8), generator=generator)
    patches = F.interpolate(coarse, scale_factor=8)[..., :side, :side]
    return (patches + 0.1 * torch.randn(patches.shape, generator=generator)).clamp(0, 1)


def public_layout(codes, hidden, blocks, initial):
    """Name -> shape of every tensor of the two public files."""

    def convolution(shapes, name, inputs, outputs, size):
        shapes[f"{name}.w"], shapes[f"{name}.b"] = (outputs, inputs, size, size), (outputs,)

    parts = {"encoder": {}, "decoder": {}}
    convolution(parts["encoder"], "blocks.input", 3, hidden, 7)
    convolution(parts["decoder"], "blocks.input", codes, initial, 1)
    for part, before, factors, sizes in (
        ("encoder", hidden, (1, 2, 4, 8), (3, 3, 3, 1)),
        ("decoder", initial, (8, 4, 2, 1), (1, 3, 3, 3)),
    ):
        for group, factor in enumerate(factors, 1):
            for block in range(1, blocks + 1):
                name, width = f"blocks.group_{group}.block_{block}", factor * hidden
                if before != width:
                    convolution(parts[part], f"{name}.id_path", before, width, 1)
                widths = [before, width // 4, width // 4, width // 4, width]
                for number in range(4):
                    path = f"{name}.res_path.conv_{number + 1}"
                    convolution(parts[part], path, widths[number], widths[number + 1], sizes[number])
                before = width
    convolution(parts["encoder"], "blocks.output.conv", 8 * hidden, codes, 1)
    convolution(parts["decoder"], "blocks.output.conv", hidden, 6, 1)
    return parts


def random_checkpoint(**sizes):
    generator = torch.Generator().manual_seed(11)

    def new(shape):
        scale = 1.4 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.02
        return scale * torch.randn(shape, generator=generator)

    return {part: {name: new(shape) for name, shape in p.items()} for part, p in public_layout(**sizes).items()}
