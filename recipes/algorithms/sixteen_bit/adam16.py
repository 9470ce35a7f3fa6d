"""AdamW with 16-bit moments (Ramesh et al. 2021, appendix B.2): 4 bytes per parameter instead of 8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.algorithms.sharding.shards import own
from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9, VARIANCE_0_6_10, Format, Format16
from recipes.algorithms.sixteen_bit.fp16_weights import factor_of
from recipes.training.transfer import sent

# `moment_bits` of a parameter group -> formats of the running mean and of the running variance.
FORMATS: dict[int, tuple[Format, Format]] = {16: (MEAN_1_6_9, VARIANCE_0_6_10), 32: (FLOAT_32, FLOAT_32)}
MOMENTS = ("mean", "variance")
# Number of elements that the uncompiled update handles at a time. It runs some forty operations one after the other;
# their intermediate results then stay in the cache of a CPU and take little memory on a GPU.
CHUNK = {"cpu": 2**15, "cuda": 2**26}
Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # values, gradient, and both moments as they are stored


class Adam16(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with moments in 16 or 32 bits, as each parameter group chooses.

    A step is computed in 32-bit from the decoded moments, and the moments are rounded when they are stored. The running
    variance is clipped before it is used and stored. Parameters may be ordinary tensors or shards of FSDP2 (DTensor),
    whose state has the same placements.

    Codes are stored as uint8 with a last dimension of 2, because process groups do not send 16-bit integers.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.96),
        eps: float = 1e-8,
        weight_decay: float = 0.045,
        variance_clip: float | None = 5.0,
        moment_bits: int = 16,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            parameters: float32 tensors, or parameter groups, which may have their own `moment_bits`.
            lr: learning rate.
            betas: decays of the running mean and of the running variance.
            eps: added to the square root of the variance.
            weight_decay: decoupled decay, times the learning rate.
            variance_clip: upper bound of the running variance; None: no bound.
            moment_bits: 16 or 32, for groups without their own.
            compiled: on a GPU, update all tensors of a group in one Triton kernel; on a CPU, compile the update of a
                tensor with `torch.compile`.

        Raises:
            ValueError: values out of range, decays too close to 1 for 16-bit moments, parameters that are not float32.
        """
        self.compiled = compiled
        settings = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "variance_clip": variance_clip,
            "moment_bits": moment_bits,
        }
        super().__init__(parameters, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in PyTorch. Raises a ValueError as the constructor does."""
        super().add_param_group(param_group)
        _check(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[tuple[float, torch.device], list[Parts]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ValueError("adam16: sparse gradients are not supported; use dense embeddings")
                state = self.state[parameter]
                if not state:
                    state.update(_new_state(parameter, group["moment_bits"]))
                state["step"] += 1
                if parameter.dtype == torch.float16:
                    self._update_stored(group, parameter, state)
                    continue
                parts = _parts(parameter, state)
                if parts[0].numel():  # the shard of a small tensor may be empty
                    together.setdefault((state["step"].item(), parts[0].device), []).append(parts)
            for (step, device), parts in together.items():
                self._update(group, step, device, parts)
        return loss

    def _update_stored(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Update a weight that is stored in 16 bits, by 32-bit copies of it and of its gradient.

        The copies are held for one tensor at a time.
        """
        values = parameter.detach().float()
        gradient = torch.empty_like(values).copy_(parameter.grad).div_(factor_of(parameter))
        moments = (state[name] for name in MOMENTS)
        self._update(group, state["step"].item(), parameter.device, [(values, gradient, *moments)])
        parameter.copy_(values)

    def _update(self, group: dict[str, Any], step: float, device: torch.device, tensors: list[Parts]) -> None:
        scalars = _scalars(group, step)
        formats = FORMATS[group["moment_bits"]]
        betas, eps, clip = group["betas"], group["eps"], group["variance_clip"]
        if self.compiled and device.type == "cuda":
            from recipes.algorithms.sixteen_bit import adam16_kernel  # here, because Triton is slow to import

            adam16_kernel.update_all(tensors, scalars, formats, betas, eps, clip)
            return
        # As tensors, so that the compiled update is not compiled again when the values change.
        numbers = sent(scalars, torch.float32, device).unbind()
        for values, gradient, *moments in tensors:
            flat = [_flat(values), _flat(gradient), *map(_codes, moments)]
            if self.compiled:
                _compiled_update()(*flat, *numbers, *formats, *betas, eps, clip)
                continue
            for pieces in zip(*(tensor.split(CHUNK[device.type]) for tensor in flat), strict=True):
                adamw_update(*pieces, *numbers, *formats, *betas, eps, clip)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, but moments are copied as they are.

        PyTorch's own would cast every state to the dtype of its parameter: bytes to four times their size.

        Raises:
            ValueError: the state is of other groups of parameters, or of another optimizer.
        """
        super().load_state_dict({**state_dict, "state": {}})  # checks the groups and restores their settings
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [(p, group["moment_bits"]) for group in self.param_groups for p in group["params"]]
        for number, (parameter, bits) in zip(numbers, parameters, strict=True):
            if state_dict["state"].get(number):  # without gradients it has none
                self.state[parameter] = _loaded(parameter, bits, state_dict["state"][number])



def adamw_update(
    values: Tensor,
    gradient: Tensor,
    mean_codes: Tensor,
    variance_codes: Tensor,
    decay: Tensor,
    step_size: Tensor,
    root_correction: Tensor,
    mean_format: Format,
    variance_format: Format,
    beta1: float,
    beta2: float,
    eps: float,
    variance_clip: float | None,
) -> None:
    """One step of AdamW on one tensor, in place.

    Args:
        values: (N,) float32, the parameters.
        gradient: (N,) float32.
        mean_codes: (N,) in the dtype of `mean_format`.
        variance_codes: (N,) in the dtype of `variance_format`.
        decay: scalar, learning rate times weight decay.
        step_size: scalar, learning rate divided by the bias correction of the mean.
        root_correction: scalar, square root of the bias correction of the variance.
        mean_format: format of the codes of the mean.
        variance_format: format of the codes of the variance.
        beta1: decay of the mean.
        beta2: decay of the variance.
        eps: added to the square root of the variance.
        variance_clip: upper bound of the variance, or None.
    """
    mean = torch.lerp(mean_format.decode(mean_codes), gradient, 1 - beta1)
    variance = (variance_format.decode(variance_codes) * beta2).addcmul(gradient, gradient, value=1 - beta2)
    if variance_clip is not None:
        variance = variance.clamp(max=variance_clip)
    root = variance.sqrt() / root_correction + eps
    values.sub_(decay * values + step_size * (mean / root))
    mean_codes.copy_(mean_format.encode(mean))
    variance_codes.copy_(variance_format.encode(variance))


@cache
def _compiled_update() -> Callable[..., None]:
    # Compiled for the first size, then once for any size; bits, betas and formats are constants of the kernel.
    return torch.compile(adamw_update)


def _parts(parameter: Tensor, state: dict[str, Tensor]) -> Parts:
    """What this rank has of a parameter, in one memory order."""
    values, gradient, *moments = map(own, (parameter, parameter.grad, *(state[name] for name in MOMENTS)))
    if gradient.stride() != values.stride() or gradient.dtype != values.dtype:
        gradient = torch.empty_like(values).copy_(gradient)
    return values, gradient, *moments


def _scalars(group: dict[str, Any], step: float) -> tuple[float, float, float]:
    """The arguments of `adamw_update` that change from step to step: decay, step size and root correction."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    return lr * group["weight_decay"], lr / (1 - beta1**step), math.sqrt(1 - beta2**step)


def _new_state(parameter: Tensor, bits: int) -> dict[str, Tensor]:
    """Zero moments in the memory order and placement of the parameter. In all formats, the code of zero is 0."""
    step = torch.zeros((), dtype=torch.float32)
    if bits == 32:
        return {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENTS}}
    return {"step": step, **{name: _zero_bytes(parameter) for name in MOMENTS}}


def _loaded(parameter: Tensor, bits: int, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a parameter's saved state, in the memory order, on the device and with the placement of the parameter.

    Raises:
        ValueError: shapes that the state of this parameter does not have.
    """
    fresh = _new_state(parameter, bits)
    for name in MOMENTS:
        found = saved[name].shape if name in saved else ()
        if found != fresh[name].shape:
            raise ValueError(
                f"adam16: the {name} of a parameter of shape {tuple(parameter.shape)} has shape {tuple(found)} in the "
                f"checkpoint, not {tuple(fresh[name].shape)}; the run that wrote it had other parameters with 16-bit "
                "moments, or another optimizer"
            )
        own(fresh[name]).copy_(own(saved[name]))
    fresh["step"].copy_(torch.as_tensor(saved["step"]))
    return fresh


def _zero_bytes(parameter: Tensor) -> Tensor:
    """Zeros of shape (*shape, 2) and dtype uint8, in the memory order and placement of the parameter."""
    local = own(parameter)
    order = torch.empty_like(local, device="meta").stride()  # dense, even if the parameter is a view
    strides = (*(2 * stride for stride in order), 1)
    found = torch.empty_strided((*local.shape, 2), strides, dtype=torch.uint8, device=local.device).zero_()
    if not isinstance(parameter, DTensor):
        return found
    shape = torch.Size((*parameter.shape, 2))
    return DTensor.from_local(
        found,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _codes(moment: Tensor) -> Tensor:
    """A view of a state tensor as codes, (N,) in memory order."""
    return _flat(moment.view(torch.int16) if moment.dtype == torch.uint8 else moment)


def _flat(tensor: Tensor) -> Tensor:
    """A view of shape (N,) of a dense tensor, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _check(group: dict[str, Any]) -> None:
    lr, eps, decay, clip = (group[key] for key in ("lr", "eps", "weight_decay", "variance_clip"))
    if float(lr) < 0 or eps < 0 or decay < 0:
        raise ValueError(f"adam16: lr, eps and weight_decay must not be negative, got {lr}, {eps} and {decay}")
    if clip is not None and clip <= 0:
        raise ValueError(f"adam16: variance_clip must be above 0, got {clip}; null turns it off")
    if group["moment_bits"] not in FORMATS:
        raise ValueError(f"adam16: moment_bits is 16 or 32, got {group['moment_bits']}")
    formats = FORMATS[group["moment_bits"]]
    for number, (beta, fmt) in enumerate(zip(group["betas"], formats, strict=True)):
        if not 0 <= beta < 1:
            raise ValueError(f"adam16: betas.{number} must lie in [0, 1), got {beta}")
        # If a moment decays by less than half of its last place, it is rounded back and never changes.
        if isinstance(fmt, Format16) and 1 - beta <= 2.0 ** -(fmt.significand + 1):
            raise ValueError(
                f"adam16: betas.{number} = {beta} decays by less than {fmt.name} can represent; "
                f"use less than {1 - 2.0 ** -(fmt.significand + 1):.6f}"
            )
    if group["moment_bits"] == 16 and clip is not None and clip > VARIANCE_0_6_10.largest:
        raise ValueError(f"adam16: variance_clip {clip} is above {VARIANCE_0_6_10.largest}, the largest 0-6-10 value")
    for parameter in group["params"]:
        stored = factor_of(parameter) is not None and group["moment_bits"] == 16
        if parameter.dtype != torch.float32 and not stored:
            raise ValueError(
                f"adam16: a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; keep parameters in "
                "32-bit, and set the precision of computation by training.precision"
            )
        order = torch.empty_like(own(parameter), device="meta").stride()
        if own(parameter).stride() != order:
            raise ValueError(f"adam16: a parameter of shape {tuple(parameter.shape)} is not dense in memory")
