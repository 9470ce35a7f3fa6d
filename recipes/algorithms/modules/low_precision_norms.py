"""GroupNorm and LayerNorm in autocast's precision instead of 32 bits."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.log import log
from recipes.training.lever import Lever
from recipes.training.run import Run

# Composer has LPGroupNorm and LPLayerNorm. They are not used: they ask whether the GPU's autocast is on, so that they
# do nothing under the CPU's, and their surgery makes new parameters, which earlier references then do not follow.


def _lowered(*tensors: Tensor | None) -> list[Tensor | None] | None:
    """The tensors in autocast's precision; None where it is off for the first one's device."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # which does not know of meta
        return None
    dtype = torch.get_autocast_dtype(kind)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]


class LowPrecisionGroupNorm(nn.GroupNorm):
    """Takes and gives autocast's dtype; PyTorch's kernels sum in 32 bits all the same."""

    def forward(self, x: Tensor) -> Tensor:
        lowered = _lowered(x, self.weight, self.bias)
        if lowered is None:
            return super().forward(x)
        x, weight, bias = lowered
        with torch.autocast(x.device.type, enabled=False):  # it would cast back
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Takes and gives autocast's dtype; PyTorch's kernels sum in 32 bits all the same."""

    def forward(self, x: Tensor) -> Tensor:
        lowered = _lowered(x, self.weight, self.bias)
        if lowered is None:
            return super().forward(x)
        x, weight, bias = lowered
        with torch.autocast(x.device.type, enabled=False):  # it would cast back
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def lower_norms(
    module: nn.Module, *, group_norm: bool = True, layer_norm: bool = True, modules: str | None = None
) -> int:
    """Make norms low-precision ones in place; returns their number.

    A norm stays the same object and changes its class, so parameters (the optimizer's too), names in a checkpoint and
    hooks are as before. Only plain `nn.GroupNorm` and `nn.LayerNorm` change: not what has been fused or wrapped.

    Args:
        module: holds the norms.
        group_norm: change GroupNorm.
        layer_norm: change LayerNorm.
        modules: regular expression that the start of a module's name matches, so also a prefix; None: everywhere.

    Raises:
        ValueError: not a regular expression, or nothing to change.
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
    """Normalises in autocast's precision, on a chosen part of the model: half of the memory traffic, no casts."""

    def __init__(
        self, task: nn.Module, *, group_norm: bool = True, layer_norm: bool = True, modules: str | None = None
    ) -> None:
        """See `lower_norms`.

        Args:
            group_norm: change GroupNorm.
            layer_norm: change LayerNorm.
            modules: prefix of module names (a regular expression) to change, such as `denoiser`; null: all.
        """
        self.task = task
        self.options = {"group_norm": group_norm, "layer_norm": layer_norm, "modules": modules}

    def change_modules(self, run: Run) -> None:
        if run.precision == "fp32":
            raise ValueError(
                "low_precision_norms: the run is in fp32 without autocast, where norms have no lower precision; "
                "set training.precision to amp_bf16, or remove the algorithm"
            )
        count = lower_norms(self.task, **self.options)
        log.info(f"low_precision_norms: {count} norms")
        run.log_settings({"low_precision_norms": count})
