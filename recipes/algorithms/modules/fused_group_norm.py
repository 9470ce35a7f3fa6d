"""GroupNorm and SiLU of diffusers' networks in one kernel."""

from __future__ import annotations

from typing import Literal

from diffusers import UNet2DConditionModel
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F

from data.log import log
from recipes.models.kernels.fused_norm import TIMES, FusedGroupNorm, fuse
from recipes.training.lever import Lever
from recipes.training.run import Run


class SiLUOfEmbedding(nn.Module):
    """The activation of a block with fused norms: these have activated images (4-D), but not the timestep."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() == 4 else F.silu(x)


def fuse_group_norms(module: nn.Module, measured: bool) -> int:
    """Fuse each GroupNorm of diffusers' blocks with the SiLU that follows it; returns the number of norms.

    Residual blocks have two norms; U-Nets, encoders and decoders end with one. The norm at the input of a transformer
    block has no SiLU, and gains from the memory format of the kernel alone. Names and parameters stay.

    Args:
        module: a model with networks of diffusers.
        measured: True: use the kernel only for shapes for which it is faster, measured when they first come up; False:
            always.

    Raises:
        ValueError: there is no norm to fuse.
    """
    count = 0
    for block in module.modules():
        for name, silu in _norms(block):
            fuse(getattr(block, name), silu, measured)
            count += 1
        if isinstance(getattr(block, "norm2", None), FusedGroupNorm):
            block.nonlinearity = SiLUOfEmbedding()
        if isinstance(getattr(block, "conv_norm_out", None), FusedGroupNorm):
            block.conv_act = nn.Identity()
    if not count:
        raise ValueError("fused_group_norm: the model has no GroupNorm of a diffusers block to fuse")
    return count


def _norms(block: nn.Module) -> list[tuple[str, bool]]:
    """(name, whether SiLU follows) of each norm to fuse that is a direct child of a block."""
    found: list[tuple[str, bool]] = []
    if isinstance(block, ResnetBlock2D):  # with "scale_shift" the timestep comes between norm and activation
        if block.time_embedding_norm != "scale_shift" and isinstance(block.nonlinearity, nn.SiLU):
            found = [("norm1", True), ("norm2", True)]
    elif isinstance(block, (UNet2DConditionModel, Encoder, Decoder)):
        if isinstance(block.conv_act, nn.SiLU):
            found = [("conv_norm_out", True)]
    elif isinstance(block, Transformer2DModel):
        found = [("norm", False)]
    return [
        (name, silu)
        for name, silu in found
        if isinstance(norm := getattr(block, name, None), nn.GroupNorm) and not isinstance(norm, FusedGroupNorm)
    ]


class FusedGroupNorms(Lever):
    """Computes GroupNorm and SiLU in one Triton kernel, forward and backward; to be used with channels_last."""

    def __init__(self, task: nn.Module, *, when: Literal["auto", "always"] = "auto") -> None:
        """See `fuse_group_norms`.

        Args:
            when: auto measures each shape once, when it first comes up, against eager PyTorch, and takes the faster
                one; on a CPU it leaves the model unchanged. always does not depend on timings, so runs repeat exactly.
        """
        self.task = task
        self.when = when
        self.to_report = False

    def change_modules(self, run: Run) -> None:
        if run.on_gpu:
            count = fuse_group_norms(self.task, measured=self.when == "auto")
            log.info(f"fused_group_norm: {count} norms, {self.when}")
            run.log_settings({"fused_group_norm": count})
            self.to_report = self.when == "auto"
        elif self.when == "always":
            raise ValueError("fused_group_norm: its kernels need a GPU; use auto, or remove the lever")
        else:
            log.info("fused_group_norm: not used, its kernels need a GPU")

    def step_end(self, run: Run) -> None:
        if self.to_report:
            self.report(run)

    def report(self, run: Run) -> None:
        """After the first batch, log which shapes take the kernel."""
        self.to_report = False
        for case, times in TIMES.items():
            shape = "x".join(str(size) for size in case.shape)
            taken = "fused" if times.fused_wins else "PyTorch's"
            log.info(f"fused_group_norm: {shape} {times.fused:.3f} ms, PyTorch {times.plain:.3f} ms: {taken}")
        if not TIMES:
            log.info("fused_group_norm: not used, no norm had a channels_last input; add channels_last")
        run.log_settings({"fused_group_norm_shapes": sum(times.fused_wins for times in TIMES.values())})
