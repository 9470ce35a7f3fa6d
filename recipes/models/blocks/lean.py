"""Blocks of diffusers' networks without operations that change nothing but take time.

In diffusers' forward methods each residual block divides its result by 1 and, in training, copies its input into
contiguous memory; each transformer copies its result there; and upsampling does so from 64 samples on. In a network in
channels_last each of these copies is followed by another one back, and norms between them cannot use the kernels for
channels_last.

Convolutions add their bias in a kernel of its own, and sum its gradient in another one, each over the whole feature
map. Where a convolution is followed by the addition of something smaller or of another convolution, its bias is added
there.
"""

from __future__ import annotations

from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.models.blocks.formats import format_of

MOST = 2**31 - 1  # elements that PyTorch's channels_last kernel of upsampling can index

# Letters: B batch, C channels, h w grid, E width of the embedding of the timestep.


class LeanResnetBlock(ResnetBlock2D):
    """A residual block of one grid."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None) -> Tensor:
        """The result (B, C, h, w) for an input (B, C', h, w) and the embedding of the timestep (B, E)."""
        x, y = input_tensor, self.nonlinearity(self.norm1(input_tensor))
        if self.time_emb_proj is None:
            assert temb is None
            y = self.conv1(y)
        else:
            temb = temb if self.skip_time_act else self.nonlinearity(temb)
            temb = F.linear(temb, self.time_emb_proj.weight, self.time_emb_proj.bias + self.conv1.bias)  # (B, C)
            y = _convolve(self.conv1, y) + temb[:, :, None, None]
        y = self.dropout(self.nonlinearity(self.norm2(y)))
        if self.conv_shortcut is None:
            y = x + self.conv2(y)
        elif self.conv_shortcut.bias is None:
            y = self.conv_shortcut(x) + self.conv2(y)
        else:
            y = _convolve(self.conv_shortcut, x, self.conv_shortcut.bias + self.conv2.bias) + _convolve(self.conv2, y)
        return y if self.output_scale_factor == 1 else y / self.output_scale_factor


class LeanTransformer(Transformer2DModel):
    """A transformer over the positions of a feature map."""

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        y = self.proj_out(hidden_states)
        y = y.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2)
        return y.contiguous(memory_format=format_of(residual)) + residual


class LeanUpsample(Upsample2D):
    """Upsampling to twice the grid, or to a given one, and a convolution."""

    def forward(self, hidden_states: Tensor, output_size: tuple[int, int] | None = None) -> Tensor:
        """(B, C, h, w) -> (B, C, 2 h, 2 w), or `output_size`."""
        size = output_size or [2 * side for side in hidden_states.shape[2:]]
        if hidden_states.shape[:2].numel() * size[0] * size[1] > MOST:
            hidden_states = hidden_states.contiguous()
        return self.conv(F.interpolate(hidden_states, size=size, mode="nearest"))


def _convolve(conv: nn.Conv2d, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution with another bias than its own, or with none."""
    return F.conv2d(x, conv.weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def make_lean(module: nn.Module) -> int:
    """Change blocks of diffusers in place; returns their number.

    Blocks stay the same objects with the same parameters and change their class. Results are equal but for rounding.

    Raises:
        ValueError: there is nothing to change.
    """
    count = 0
    for block in module.modules():
        lean = _lean_class(block)
        if lean is not None:
            block.__class__ = lean
            count += 1
    if not count:
        raise ValueError("lean_blocks: the model has no residual, transformer or upsampling block of diffusers")
    return count


def _lean_class(block: nn.Module) -> type[nn.Module] | None:
    """The class that a block becomes; None: it stays as it is."""
    if type(block) is ResnetBlock2D:
        # Without a timestep, as in autoencoders, the other kinds of norms are the same.
        norms = block.time_embedding_norm == "default" or block.time_emb_proj is None
        plain = norms and block.time_embedding_norm != "scale_shift" and not (block.up or block.down)
        return LeanResnetBlock if plain else None
    if type(block) is Transformer2DModel:
        return LeanTransformer if block.is_input_continuous and block.use_linear_projection else None
    if type(block) is Upsample2D:
        plain = block.norm is None and block.interpolate and block.use_conv and not block.use_conv_transpose
        return LeanUpsample if plain and block.name == "conv" else None
    return None
