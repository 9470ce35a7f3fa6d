"""bf16 autocast for the meta device, which PyTorch's own refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

DTYPE = torch.bfloat16
# Functions through which models multiply matrices. PyTorch casts below them, where no mode sees it.
PRODUCTS = frozenset(
    {
        F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
        Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm,
    }
)  # fmt: skip
NORMS = frozenset({F.layer_norm, F.group_norm})  # in 32 bits under a GPU's autocast

# What models ask about autocast, and with which they set it.
TOLD = (
    (torch, "autocast"),
    (torch.amp, "autocast"),
    (torch.amp, "is_autocast_available"),
    (torch, "is_autocast_enabled"),
    (torch, "get_autocast_dtype"),
)


class MetaAutocast(TorchFunctionMode):
    """A mode in which matrices on the meta device are multiplied in bf16, and in which autocast reports that it is on.

    What models choose themselves stays: sums take the format of what they are given, and a part in which a model turns
    autocast off multiplies in the format of its factors.
    """

    def __init__(self, wide_norms: bool = False) -> None:
        """
        Args:
            wide_norms: compute norms in 32 bits, as autocast on a GPU does; otherwise in the format of their input.
        """
        super().__init__()
        self.enabled = True
        self.wide_norms = wide_norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.enabled and func in PRODUCTS:
            args, kwargs = tree_map_only(Tensor, _cast, (args, kwargs))
        elif self.enabled and self.wide_norms and func in NORMS:
            args, kwargs = tree_map_only(Tensor, _widen, (args, kwargs))
        return func(*args, **kwargs)

    def __enter__(self) -> MetaAutocast:
        self._known = [(place, name, getattr(place, name)) for place, name in TOLD]
        autocast, _, is_available, is_enabled, dtype_of = (known for _, _, known in self._known)

        def autocast_here(device_type: str, *options: Any, **named: Any) -> Any:
            here = device_type == "meta"
            return self._set(*options, **named) if here else autocast(device_type, *options, **named)

        torch.autocast = torch.amp.autocast = autocast_here  # recomputation asks the latter
        torch.amp.is_autocast_available = lambda kind: kind == "meta" or is_available(kind)
        torch.is_autocast_enabled = lambda *kind: self.enabled if kind == ("meta",) else is_enabled(*kind)
        torch.get_autocast_dtype = lambda kind: DTYPE if kind == "meta" else dtype_of(kind)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for place, name, known in self._known:
            setattr(place, name, known)
        super().__exit__(*error)

    @contextmanager
    def _set(self, dtype: torch.dtype | None = None, enabled: bool = True, **options: Any) -> Iterator[None]:
        """Takes the place of `torch.autocast("meta", ...)` in this mode."""
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before


def _cast(tensor: Tensor) -> Tensor:
    return tensor.to(DTYPE) if tensor.is_meta and tensor.dtype == torch.float32 else tensor


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_meta else tensor
