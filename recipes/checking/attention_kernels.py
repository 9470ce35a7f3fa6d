"""Checks that attention computes here what it should: the kernel runs once, forward and backward, on a small input."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from recipes.algorithms.modules.attention import KERNELS, Implementation, why_not_xformers
from recipes.checking.finding import Finding
from recipes.config.recipe import Recipe
from recipes.models.autoregressive.masks import dense_mask, visible
from recipes.models.autoregressive.sparse_attention import make_attend
from recipes.models.autoregressive.transformer import TokenTransformer

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values, and the result, of one shape
WIDTH = 64  # of a head
# The largest error that rounding explains, relative to the largest value of the result.
ERROR = {torch.float32: 1e-4, torch.float16: 1e-2}


def attention(implementation: Implementation = "auto") -> Finding:
    """Whether an implementation of the algorithm `attention` runs on this machine's device, and computes attention.

    Args:
        implementation: of diffusers' networks.
    """
    reason = why_not_xformers(torch.cuda.is_available())
    why = f" ({reason})" if implementation == "auto" and reason else ""
    name = ("sdpa" if reason else "xformers") if implementation == "auto" else implementation
    if name == "eager":
        return Finding("ok", "attention", "eager: matrix products and a softmax")
    if name == "xformers" and reason:
        return Finding("error", "attention", f"xformers cannot run here ({reason}); use sdpa or auto")
    # The kernels take (B, S, H, D).
    return _outcome(f"{name}{why}", "use another implementation", KERNELS[name], (2, 16, 2, WIDTH), swap=True)


def attentions(recipe: Recipe, task: nn.Module) -> Iterator[Finding]:
    """The same of those that a recipe names.

    Args:
        recipe: whose algorithm `attention` sets that of diffusers' networks.
        task: its model, on any device. A transformer over tokens has attention of its own.
    """
    for component in recipe.algorithms.values():
        if component.name == "attention":
            yield attention(component.args.get("implementation", "auto"))
    for transformer in (module for module in task.modules() if isinstance(module, TokenTransformer)):
        layout, device = transformer.layout, _device()
        for kind in dict.fromkeys(transformer.kinds):
            try:
                attend = make_attend(transformer.implementation, kind, layout, device, transformer.head_width)
            except ValueError as error:
                yield Finding("error", "attention", str(error))
                return
            mask = dense_mask(visible(kind, layout), layout.length, device)
            name = f"{transformer.implementation} with the {kind} mask"
            shape = (1, 1, layout.length, WIDTH)
            yield _outcome(name, "use implementation: masked", _entering(attend), shape, mask=mask)


def _entering(attend) -> Attention:
    """Attention over (B, H, S, D) in raster order, whatever the order of the implementation."""

    def call(*tensors: Tensor) -> Tensor:
        y = attend(*(attend.enter(tensor.flatten(0, 1)).unflatten(0, (1, 1)) for tensor in tensors))
        return attend.leave(y.flatten(0, 1)).unflatten(0, (1, 1))

    return call


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def naive(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention by its definition, for (B, H, S, D)."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def _outcome(
    name: str, remedy: str, kernel: Attention, shape: tuple[int, ...], swap: bool = False, mask: Tensor | None = None
) -> Finding:
    device = _device()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]
    exact = [tensor.double() for tensor in inputs]

    def wanted(*tensors: Tensor) -> Tensor:
        if not swap:
            return naive(*tensors, mask)
        return naive(*(tensor.transpose(1, 2) for tensor in tensors)).transpose(1, 2)

    try:
        found = _results(kernel, inputs)
    except Exception as error:  # a missing symbol or kernel, or a compiler that fails
        line = str(error).splitlines()[0] if str(error) else "no detail"
        text = f"{name} does not run on this {device.type} ({type(error).__name__}: {line}); {remedy}"
        return Finding("error", "attention", text)
    pairs = zip(found, _results(wanted, exact), strict=True)
    error = max(((mine - right).abs().max() / right.abs().max()).item() for mine, right in pairs)
    if not error <= ERROR[dtype]:
        text = f"{name} is wrong by {error:.1g} on this {device.type}, forward or backward; {remedy}"
        return Finding("error", "attention", text)
    return Finding("ok", "attention", f"{name}, right on this {device.type} forward and backward")


def _results(kernel: Attention, inputs: list[Tensor]) -> list[Tensor]:
    """The result and the three gradients of the sum of its squares."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    y = kernel(*inputs)
    y.float().square().sum().backward() if y.dtype != torch.float64 else y.square().sum().backward()
    gradients = (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs)
    return [y.detach(), *gradients]
