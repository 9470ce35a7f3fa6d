"""AdamW whose moments take two bytes each (Ramesh et al. 2021, appendix D): 4 bytes a parameter instead of 8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9, VARIANCE_0_6_10, Format, Format16

# Bits of a group's moments -> formats of the running mean and of the running variance.
FORMATS: dict[int, tuple[Format, Format]] = {16: (MEAN_1_6_9, VARIANCE_0_6_10), 32: (FLOAT_32, FLOAT_32)}
MOMENTS = ("mean", "variance")
# Elements that are updated at a time where nothing is compiled: some forty operations follow each other, and their
# results stay in a processor's cache, or take little of a GPU's memory.
CHUNK = {"cpu": 2**15, "cuda": 2**26}
Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # values, gradient, codes of the mean and of the variance


class Adam16(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with moments in 16 or 32 bits, a choice of each parameter group.

    A step is computed in 32-bit from the decoded moments, and the moments are rounded when they are stored. The running
    variance is clipped before it is used and stored. Parameters may be plain or shards of FSDP2 (DTensor); their state
    then has the same placements.

    The codes are kept as bytes, in a last dimension of two: process groups send no 16-bit integers, and what
    `torch.optim.Optimizer.load_state_dict` does to a state, casting it to the parameter's type, bytes survive.
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
            parameters: tensors, or groups of them, which may have their own `moment_bits`.
            lr: learning rate.
            betas: decays of the running mean and of the running variance.
            eps: added to the root of the variance.
            weight_decay: decoupled decay, times the learning rate.
            variance_clip: largest running variance; None: none.
            moment_bits: 16 or 32, for groups that do not say.
            compiled: on a GPU one Triton kernel updates all tensors of a group; on a CPU `torch.compile` makes one
                of a tensor's update.

        Raises:
            ValueError: values out of range, decays that 16-bit moments cannot follow, parameters not in 32-bit.
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
        """As in PyTorch, checked."""
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
                if _local(parameter).numel():  # a rank may have nothing of a small tensor
                    key = (state["step"].item(), parameter.device)
                    together.setdefault(key, []).append(_parts(parameter, state))
            for (step, device), parts in together.items():
                self._update(group, step, device, parts)
        return loss

    def _update(self, group: dict[str, Any], step: float, device: torch.device, tensors: list[Parts]) -> None:
        scalars = _scalars(group, step)
        formats = FORMATS[group["moment_bits"]]
        betas, eps, clip = group["betas"], group["eps"], group["variance_clip"]
        if self.compiled and device.type == "cuda":
            from recipes.algorithms.sixteen_bit.adam16_kernel import (
                update_all,  # Triton is slow to import, and needs a GPU
            )

            update_all(tensors, scalars, formats, betas, eps, clip)
            return
        # As tensors, so that compiled kernels stay as they are from step to step.
        numbers = torch.tensor(scalars, dtype=torch.float32, device=device).unbind()
        for parts in tensors:
            if self.compiled:
                _compiled_update()(*parts, *numbers, *formats, *betas, eps, clip)
                continue
            for pieces in zip(*(tensor.split(CHUNK[device.type]) for tensor in parts), strict=True):
                adamw_update(*pieces, *numbers, *formats, *betas, eps, clip)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by `load_state_dict`, which has cast bytes to the parameter's type: exact, and undone here."""
        super().__setstate__(state)
        for group in self.param_groups:
            for parameter in group["params"]:
                loaded = self.state.get(parameter)
                if not loaded:
                    continue
                fresh = _new_state(parameter, group["moment_bits"])
                for name in MOMENTS:
                    if loaded[name].shape != fresh[name].shape:
                        raise ValueError(
                            f"adam16: the {name} of a parameter of shape {tuple(parameter.shape)} has shape "
                            f"{tuple(loaded[name].shape)} in the checkpoint, not {tuple(fresh[name].shape)}; the run "
                            "that wrote it had other 16-bit parameters, or another optimizer"
                        )
                    _local(fresh[name]).copy_(_local(loaded[name]))  # in the parameter's own memory order
                    loaded[name] = fresh[name]
                loaded["step"] = fresh["step"].copy_(loaded["step"])  # the saved tensors stay as they were

    def memory(self) -> dict[str, float]:
        """Memory of the moments on this rank, before the first step too.

        Returns:
            `parameters`, `parameters_16_bit`: numbers of them; `bytes`: of all moments; `bytes_per_parameter`.
        """
        sizes = {bits: 0 for bits in FORMATS}
        for group in self.param_groups:
            sizes[group["moment_bits"]] += sum(_local(p).numel() for p in group["params"])
        count = sum(sizes.values())
        used = sum(size * 2 * bits // 8 for bits, size in sizes.items())
        return {
            "parameters": count,
            "parameters_16_bit": sizes[16],
            "bytes": used,
            "bytes_per_parameter": used / max(count, 1),
        }


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
        mean_codes: (N,) in `mean_format`'s type.
        variance_codes: (N,) in `variance_format`'s type.
        decay: scalar, learning rate times weight decay.
        step_size: scalar, learning rate over the mean's bias correction.
        root_correction: scalar, root of the variance's bias correction.
        mean_format: of the codes.
        variance_format: of the codes.
        beta1: decay of the mean.
        beta2: decay of the variance.
        eps: added to the root.
        variance_clip: largest variance, or None.
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
    # Compiled for the first size, then for any; bits, betas and formats are constants of the kernels.
    return torch.compile(adamw_update)


def _parts(parameter: Tensor, state: dict[str, Tensor]) -> Parts:
    """This rank's values, gradient and codes of both moments, (N,) each and in one order."""
    values, gradient = _local(parameter), _local(parameter.grad)
    if gradient.stride() != values.stride() or gradient.dtype != values.dtype:
        gradient = torch.empty_like(values).copy_(gradient)
    mean, variance = (_codes(_local(state[name])) for name in MOMENTS)
    return _flat(values), _flat(gradient), _flat(mean), _flat(variance)


def _scalars(group: dict[str, Any], step: float) -> tuple[float, float, float]:
    """What changes from step to step: decay, step size and root correction of `adamw_update`."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    return lr * group["weight_decay"], lr / (1 - beta1**step), math.sqrt(1 - beta2**step)


def _new_state(parameter: Tensor, bits: int) -> dict[str, Tensor]:
    """Zero moments, in the parameter's memory order and placement; all formats have the code 0 for zero."""
    step = torch.zeros((), dtype=torch.float32)
    if bits == 32:
        return {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENTS}}
    return {"step": step, **{name: _zero_bytes(parameter) for name in MOMENTS}}


def _zero_bytes(parameter: Tensor) -> Tensor:
    """(*shape, 2) uint8."""
    local = _local(parameter)
    order = torch.empty_like(local, device="meta").stride()  # dense, even where the parameter is a view
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
    """The codes in a state tensor, in its own memory."""
    return moment.view(torch.int16).squeeze(-1) if moment.dtype == torch.uint8 else moment


def _flat(tensor: Tensor) -> Tensor:
    """(N,) the elements of a dense tensor in memory order, in its own memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


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
        # A moment that shrinks by less than half of its last place is rounded back to what it was, for ever.
        if isinstance(fmt, Format16) and 1 - beta <= 2.0 ** -(fmt.significand + 1):
            raise ValueError(
                f"adam16: betas.{number} = {beta} decays by less than {fmt.name} can show; "
                f"take less than {1 - 2.0 ** -(fmt.significand + 1):.6f}"
            )
    if group["moment_bits"] == 16 and clip is not None and clip > VARIANCE_0_6_10.largest:
        raise ValueError(f"adam16: variance_clip {clip} is above {VARIANCE_0_6_10.largest}, the largest 0-6-10 value")
    for parameter in group["params"]:
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"adam16: a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; keep parameters in "
                "32-bit, with training.precision for the arithmetic"
            )
        order = torch.empty_like(_local(parameter), device="meta").stride()
        if _local(parameter).stride() != order:
            raise ValueError(f"adam16: a parameter of shape {tuple(parameter.shape)} is not dense in memory")
