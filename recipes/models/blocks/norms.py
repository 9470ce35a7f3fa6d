"""GroupNorm and SiLU of diffusers' networks in one kernel."""

from __future__ import annotations

from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.models.blocks.attention import AttentionOnViews
from recipes.models.blocks.lean import LeanResnetBlock
from recipes.models.kernels.fused_norm import FusedGroupNorm, fuse

# Of the blocks whose norms are known.
FORWARDS = (
    ResnetBlock2D.forward, LeanResnetBlock.forward, UNet2DConditionModel.forward, Encoder.forward, Decoder.forward,
    Transformer2DModel.forward, Attention.forward,
)  # fmt: skip


class SiLUOfEmbedding(nn.Module):
    """The activation of a block with fused norms: these have activated images (4-D), but not the timestep."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() == 4 else F.silu(x)


def fuse_group_norms(module: nn.Module, measured: bool) -> int:
    """Fuse each GroupNorm of diffusers' blocks with the SiLU that follows it; returns the number of norms.

    Residual blocks have two norms; U-Nets, encoders and decoders end with one. The norm at the input of a transformer
    block, or of an attention block on views, has no SiLU, and gains from the memory format of the kernel alone. Names
    and parameters stay.

    Args:
        module: a model with networks of diffusers.
        measured: True: use the kernel only for shapes for which it is faster, measured when they first come up; False:
            always.

    Raises:
        ValueError: there is no norm to fuse.
    """
    check_norms(module)
    count = 0
    for block in module.modules():
        for name, silu in _norms(block):
            fuse(getattr(block, name), silu, measured)
            count += 1
        if isinstance(getattr(block, "norm2", None), FusedGroupNorm):
            block.nonlinearity = SiLUOfEmbedding()
        if isinstance(getattr(block, "conv_norm_out", None), FusedGroupNorm):
            block.conv_act = nn.Identity()
    return count


def check_norms(module: nn.Module) -> None:
    """
    Raises:
        ValueError: the model has no norm that `fuse_group_norms` would change.
    """
    if not any(_norms(block) for block in module.modules()):
        raise ValueError("fused_group_norm: the model has no GroupNorm of a diffusers block to fuse; remove the lever")


def _norms(block: nn.Module) -> list[tuple[str, bool]]:
    """(name, whether SiLU follows) of each norm to fuse that is a direct child of a block."""
    found: list[tuple[str, bool]] = []
    if type(block).forward not in FORWARDS:  # of a class of one's own, which may do something else with its norms
        return []
    if isinstance(block, ResnetBlock2D):  # with "scale_shift" the timestep comes between norm and activation
        if block.time_embedding_norm != "scale_shift" and isinstance(block.nonlinearity, nn.SiLU):
            found = [("norm1", True), ("norm2", True)]
    elif isinstance(block, (UNet2DConditionModel, Encoder, Decoder)):
        if isinstance(block.conv_act, nn.SiLU):
            found = [("conv_norm_out", True)]
    elif isinstance(block, Transformer2DModel):
        found = [("norm", False)]
    elif isinstance(block, Attention) and isinstance(block.processor, AttentionOnViews):  # diffusers' flatten pictures
        found = [("group_norm", False)]
    norms = [(getattr(block, name, None), name, silu) for name, silu in found]
    if not all(_is_plain(norm) for norm, _, _ in norms if norm is not None):  # one may lean on the activation of both
        return []
    return [(name, silu) for norm, name, silu in norms if norm is not None and not isinstance(norm, FusedGroupNorm)]


def _is_plain(norm: nn.Module) -> bool:
    """Whether a norm computes what nn.GroupNorm does, which a norm of one's own need not do."""
    group_norm = isinstance(norm, nn.GroupNorm) and norm.affine
    return group_norm and (type(norm).forward is nn.GroupNorm.forward or getattr(norm, "is_group_norm", False))
