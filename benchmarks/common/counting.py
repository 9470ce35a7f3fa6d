"""Counts kernel launches of a step, and the times that the host waits for the device, on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.algorithms.sixteen_bit import adam16_kernel
from recipes.algorithms.sixteen_bit.adam16 import FORMATS, Adam16
from recipes.models.kernels import fused_norm, geglu, geglu_kernels, group_norm_kernels, group_norm_silu

# Operations that only describe memory, besides views.
NO_LAUNCH = {
    "alias", "detach", "detach_", "empty", "empty_like", "empty_permuted", "empty_strided", "lift_fresh", "new_empty",
    "new_empty_strided", "resize_", "set_", "_unsafe_view", "_reshape_alias", "device",
    "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
# Operations whose result's value or size the host needs: it waits for all that the device has been given.
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount"}
# The same for methods that PyTorch does not dispatch where the tensor is on the host already.
HOST_METHODS = {"cpu", "numpy", "tolist"}


class Launches(TorchDispatchMode):
    """Counts operations.

    One operation counts as one launch, which is a lower bound: a convolution with bias takes two kernels, and a fused
    optimizer one for each group of tensors. On a CPU autocast's lists of operations differ a little from a GPU's.

    Attributes:
        launches: name of the operation -> number of those that launch at least one kernel.
        casts: copies to another dtype.
        waits: name of the operation -> number of those for which the host waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.casts = 0
        self.waits: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All launches."""
        return self.launches.total()

    @property
    def copies(self) -> int:
        """Copies of a whole tensor to other memory or to another format, without casts."""
        return self.launches["clone"] + self.launches["copy_"] + self.launches["_to_copy"] - self.casts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in WAITS or (name.startswith(("index", "repeat_interleave")) and _by_mask(func, args)):
            self.waits[name] += 1
        if not func.is_view and name not in NO_LAUNCH:
            self.launches[name] += 1
            self.casts += name == "_to_copy" and args[0].dtype != result.dtype
        return result


class HostReads(TorchFunctionMode):
    """Counts calls of methods that move values to the host."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_METHODS and args and isinstance(args[0], torch.Tensor):
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(func: Any, args: Any) -> bool:
    """Whether the size of the result depends on values: indices that are a mask, or repeats in a tensor."""
    if func.overloadpacket.__name__.startswith("repeat_interleave"):
        return func._overloadname == "Tensor"
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


@contextmanager
def counting(launches: Launches, kernels: bool = False) -> Iterator[None]:
    """Count what runs inside.

    Args:
        launches: receives the counts.
        kernels: let the Triton kernels of this repository be launched as on a GPU. Each launch is counted and does
            nothing, so results are meaningless.
    """

    def launch(kernel: Any, *arguments: Any) -> None:
        launches.launches[f"triton{kernel.fn.__name__}"] += 1

    def launch_norm(kernel: Any, plan: Any, *arguments: Any) -> None:
        launches.launches[f"triton_norm{kernel.fn.__name__}"] += 1 if plan.splits == 1 else 2

    def update(optimizer: Adam16, group: Any, step: float, device: Any, tensors: Any) -> None:
        adam16_kernel.update_all(tensors, (0.0, 0.0, 1.0), FORMATS[group["moment_bits"]], group["betas"], 0.0, None)

    def launch_update(*arguments: Any) -> None:
        launches.launches["triton_adam16"] += 1

    with ExitStack() as stack:
        if kernels:
            for module in (fused_norm, group_norm_silu, geglu):
                stack.enter_context(patch.object(module, "INTERPRETED", True))
            stack.enter_context(patch.object(Adam16, "_update", update))
            stack.enter_context(patch.object(adam16_kernel, "_launch", launch_update))
            stack.enter_context(patch.object(geglu_kernels, "_launch", launch))
            stack.enter_context(patch.object(group_norm_kernels, "_launch", launch_norm))
        stack.enter_context(HostReads(launches.waits))
        stack.enter_context(launches)
        yield
