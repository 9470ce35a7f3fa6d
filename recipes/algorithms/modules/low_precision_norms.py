"""GroupNorm and LayerNorm in the precision of autocast instead of 32 bits."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.system.log import log
from recipes.training.lever import Lever
from recipes.training.run import Run

# Composer's LPGroupNorm and LPLayerNorm are not used: they ask for the autocast of the GPU alone, so they do nothing
# under that of the CPU, and they have new parameters, which references made before do not follow.


def _lowered(*tensors: Tensor | None) -> list[Tensor | None] | None:
    """The tensors in the precision of autocast; None if autocast is off for the device of the first."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast raises for the meta device
        return None
    dtype = torch.get_autocast_dtype(kind)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]


class LowPrecisionGroupNorm(nn.GroupNorm):
    """Input and output have the dtype of autocast; PyTorch's kernels still accumulate in 32 bits."""

    is_group_norm = True  # for the fused one, which computes in 32 bits

    def forward(self, x: Tensor) -> Tensor:
        lowered = _lowered(x, self.weight, self.bias)
        if lowered is None:
            return super().forward(x)
        x, weight, bias = lowered
        with torch.autocast(x.device.type, enabled=False):  # which would cast back to 32 bits
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Input and output have the dtype of autocast; PyTorch's kernels still accumulate in 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        lowered = _lowered(x, self.weight, self.bias)
        if lowered is None:
            return super().forward(x)
        x, weight, bias = lowered
        with torch.autocast(x.device.type, enabled=False):  # which would cast back to 32 bits
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def lower_norms(
    module: nn.Module, *, group_norm: bool = True, layer_norm: bool = True, modules: str | None = None
) -> int:
    """Change norms to low precision in place; returns the number of norms.

    A norm stays the same object and changes its class, so its parameters (also in the optimizer), its hooks and its
    names in checkpoints stay. Only plain `nn.GroupNorm` and `nn.LayerNorm` change, not those that are fused already.

    Args:
        module: the model.
        group_norm: change GroupNorm.
        layer_norm: change LayerNorm.
        modules: regular expression that must match at the start of a module's name, such as a prefix; None: all.

    Raises:
        ValueError: `modules` is not a regular expression, or there is no norm to change.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    if group_norm:
        classes[nn.GroupNorm] = LowPrecisionGroupNorm
    if layer_norm:
        classes[nn.LayerNorm] = LowPrecisionLayerNorm
    try:
        pattern = re.compile(modules or "")
    except re.error as error:
        raise ValueError(f"low_precision_norms.modules: {modules!r} is no regular expression: {error}") from None
    norms = [(name, norm) for name, norm in module.named_modules() if type(norm) in classes]
    chosen = [norm for name, norm in norms if pattern.match(name)]
    if not chosen:
        kinds = " or ".join(kind.__name__ for kind in classes) or "norm: group_norm and layer_norm are both false,"
        where = f" whose name starts with {modules!r}" if modules else ""
        hint = f"; there are {len(norms)}, such as {norms[0][0]}" if norms else ""
        raise ValueError(f"low_precision_norms: nothing to change, the model has no plain {kinds}{where}{hint}")
    for norm in chosen:
        norm.__class__ = classes[type(norm)]
    return len(chosen)


class LowPrecisionNorms(Lever):
    """Runs norms in the precision of autocast, in all or a part of the model: half the memory traffic, and no casts."""

    def __init__(
        self, task: nn.Module, *, group_norm: bool = True, layer_norm: bool = True, modules: str | None = None
    ) -> None:
        """See `lower_norms`.

        Args:
            group_norm: change GroupNorm.
            layer_norm: change LayerNorm.
            modules: prefix (a regular expression) of the names of modules to change, such as `denoiser`; null: all.
        """
        self.task = task
        self.options = {"group_norm": group_norm, "layer_norm": layer_norm, "modules": modules}

    def change_modules(self, run: Run) -> None:
        if run.precision == "fp32":
            raise ValueError(
                "low_precision_norms: the run is in fp32 without autocast, where norms have no lower precision; "
                "set training.precision to amp_bf16, or remove the lever"
            )
        count = lower_norms(self.task, **self.options)
        log.info(f"low_precision_norms: {count} norms")
        run.log_settings({"low_precision_norms": count})
