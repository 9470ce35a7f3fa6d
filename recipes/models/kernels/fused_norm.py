"""A module that computes GroupNorm, and a following SiLU, by one kernel, and whether that is faster."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.models.kernels.device_graph import is_for_graph
from recipes.models.kernels.devices import hold
from recipes.models.kernels.group_norm_silu import DTYPES, INTERPRETED, group_norm_silu

WARM_UP, REPEATS = 3, 11
MARGIN = 0.95  # the kernel must take less than this share of the time, or noise would decide


class FusedGroupNorm(nn.GroupNorm):
    """A GroupNorm that `fuse` has changed: the same parameters, computed in one kernel, optionally with SiLU.

    The kernel computes in float32 and writes the dtype of autocast, which is more precise than a low-precision norm.

    Attributes:
        plain: the class that the norm had. It computes the inputs that the kernel does not take.
        silu: whether SiLU follows.
        measured: whether the kernel is used only for shapes for which it is faster (`is_faster`).
    """

    plain: type[nn.GroupNorm]
    silu: bool
    measured: bool
    is_group_norm = True  # although its forward is another one

    def forward(self, x: Tensor) -> Tensor:
        if self._takes(x):
            kind = x.device.type
            autocast = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
            case = (self.plain, tuple(x.shape), self.num_groups, x.dtype, dtype, autocast, self.silu)
            if not self.measured or is_faster(*case):
                return group_norm_silu(x, self.weight, self.bias, self.num_groups, self.eps, self.silu, dtype)
        y = super().forward(x)
        return F.silu(y) if self.silu else y

    def _takes(self, x: Tensor) -> bool:
        if x.dim() != 4 or x.dtype not in DTYPES or not (x.is_cuda or INTERPRETED) or x.is_meta:
            return False
        # A network in contiguous memory format would need a copy at each norm.
        return not self.measured or x.is_contiguous(memory_format=torch.channels_last)


def fuse(norm: nn.GroupNorm, silu: bool, measured: bool) -> None:
    """Turn a norm into a FusedGroupNorm in place. The object, its parameters, hooks and names stay the same.

    Args:
        norm: a GroupNorm with weight and bias.
        silu: whether to apply SiLU too. The caller removes the SiLU that followed.
        measured: use the kernel only for shapes for which it is faster; otherwise always.
    """
    assert norm.affine and not isinstance(norm, FusedGroupNorm)
    norm.__class__ = _fused_class(type(norm))
    norm.silu, norm.measured = silu, measured


@functools.cache
def _fused_class(plain: type[nn.GroupNorm]) -> type[FusedGroupNorm]:
    return type(f"Fused{plain.__name__}", (FusedGroupNorm, plain), {"plain": plain})


@dataclass(frozen=True)
class Case:
    """What a norm's time depends on: class, shape (N, C, H, W), groups, dtypes of input and output, autocast, SiLU, and
    whether a CUDA graph launches it."""

    plain: type[nn.GroupNorm]
    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    out: torch.dtype
    autocast: bool
    silu: bool
    graphed: bool = False


@dataclass(frozen=True)
class Times:
    """Milliseconds per forward and backward pass, by the kernel and by PyTorch."""

    fused: float
    plain: float

    @property
    def fused_wins(self) -> bool:
        return self.fused < MARGIN * self.plain


TIMES: dict[Case, Times] = {}  # measured in this process


@torch.compiler.assume_constant_result
def is_faster(*values: Any) -> bool:
    """Whether the kernel is faster for a case, given by its fields. Each case is measured once per process.

    The kernel is compared with PyTorch's eager kernels, even if the network is compiled: the compiler calls this
    function while it traces, with plain values only.
    """
    case = Case(*values, graphed=is_for_graph())
    if case not in TIMES:
        # A new thread has neither the caller's autocast and gradient mode, nor the hooks of activation checkpointing,
        # which would count the tensors saved here.
        results: list[Times | BaseException] = []
        device = torch.cuda.current_device()
        thread = threading.Thread(target=_measure_into, args=(results, case, device))
        thread.start()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        TIMES[case] = results[0]
    return TIMES[case].fused_wins


def _measure_into(results: list[Times | BaseException], case: Case, device: int) -> None:
    try:
        torch.cuda.set_device(device)
        results.append(measure(case, torch.device("cuda", device)))
    except BaseException as error:  # an error in a thread would only be printed
        results.append(error)


def measure(case: Case, device: torch.device) -> Times:
    """Time a case with and without the kernel, from a channels_last input to a channels_last gradient.

    The conversions of layout and dtype that PyTorch's norm makes necessary are included: the next convolution takes
    channels_last input in the lower precision, and the previous one takes its gradient likewise.
    """
    generator = torch.Generator(device).manual_seed(0)  # its own, so that the global generator is left alone
    x = torch.randn(case.shape, device=device, dtype=case.dtype, generator=generator)
    dy = torch.randn(case.shape, device=device, dtype=case.out, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = dy.contiguous(memory_format=torch.channels_last)
    steps = {}
    for name in ("fused", "plain"):
        norm = case.plain(case.groups, case.shape[1], device=device)
        if name == "fused":
            fuse(norm, case.silu, measured=False)
        steps[name] = _step(norm, x, dy, case, silu=case.silu and name == "plain")
    with torch.autocast(device.type, dtype=case.out, enabled=case.autocast):
        return Times(**_interleaved(steps, case.graphed))


def _step(norm: nn.Module, x: Tensor, dy: Tensor, case: Case, silu: bool) -> Callable[[], None]:
    def step() -> None:
        y = norm(x)
        y = F.silu(y) if silu else y
        y = y.to(case.out).contiguous(memory_format=torch.channels_last)
        dx = torch.autograd.grad(y, (x, norm.weight, norm.bias), dy)[0]
        dx.contiguous(memory_format=torch.channels_last)

    return step


def _interleaved(steps: dict[str, Callable[[], None]], graphed: bool) -> dict[str, float]:
    """Median milliseconds of each step. Steps take turns, so that a change of clock rates affects all of them.

    Where the host takes longer for the launches than the GPU for the work, as on small grids, its time counts: in a run
    that waits for the host it is what the norm costs, and in another one both ways take the GPU little. A CUDA graph
    launches a norm without the host, and with the few samples for which graphs are meant, all grids are small: then the
    GPU's own time is measured.
    """
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    if graphed:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in steps.values():
            step()
        launches = time.perf_counter() - began
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if graphed:
                hold(1.5 * launches)
            start.record()
            step()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) for s, e in pairs) for name, pairs in events.items()}
