"""FlexAttention with one mask, compiled so that it never runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

SHORTEST = 128  # positions; below, PyTorch compiles another kernel (flex_decoding), made for few queries and many keys
NARROWEST = 16  # width of a head; PyTorch compiles no kernels for narrower ones

# Queries and keys per block. With 64 keys, a row layer of the published size would compute 10% fewer pairs, and the
# convolutional layer 7%. But then the tiles of FlexAttention's kernels must be set, and PyTorch 2.7 refuses blocks that
# do not fit its own tiles (128 keys on Hopper) before it looks at `kernel_options`.
BLOCK = (128, 128)

Backend = str | Callable[..., Callable[..., object]]


class FlexAttention:
    """PyTorch's FlexAttention with a mask: only blocks with at least one visible pair are computed.

    Each mask, shape, dtype and gradient mode has a function of its own. PyTorch compiles a function again for each
    shape, and after 8 times runs it uncompiled, where all pairs are computed, with no more than a warning. All masks
    together, at the sizes that the search for a microbatch tries, would exceed that.
    """

    def __init__(self, blocks: BlockMask, backend: Backend | None = "inductor") -> None:
        """
        Args:
            blocks: the mask, see `block_mask`.
            backend: backend of torch.compile; None: without compilation, for tests on a CPU.
        """
        self.blocks = blocks
        self.backend = backend
        self.options: dict[str, int] | None = None  # of the kernels; None: PyTorch's, whose tiles fit into `BLOCK`
        self.compiled: dict[tuple[object, ...], Callable[..., Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, S, D) each -> (B, H, S, D).

        Raises:
            torch._dynamo.exc.FailOnRecompileLimitHit: a function would have run uncompiled.
        """
        if self.backend is None or torch.compiler.is_compiling():  # part of a larger graph
            return flex_attention(q, k, v, block_mask=self.blocks, kernel_options=self.options)
        key = (q.shape, q.dtype, torch.is_grad_enabled(), q.requires_grad, torch.is_inference_mode_enabled())
        if key not in self.compiled:
            # With fullgraph, running out of recompilations is an error.
            self.compiled[key] = torch.compile(
                separate(self._function()), backend=self.backend, dynamic=False, fullgraph=True
            )
        return self.compiled[key](q, k, v)

    def _function(self) -> FunctionType:
        blocks, options = self.blocks, self.options

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=blocks, kernel_options=options)

        return attend


def separate(function: FunctionType) -> FunctionType:
    """A copy of a function with code of its own, because compilations are counted and kept per code object."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def block_mask(
    sees: Callable[[Tensor, Tensor], Tensor],
    length: int,
    device: torch.device,
    block: tuple[int, int] = BLOCK,
) -> BlockMask:
    """FlexAttention's BlockMask of a mask, shared by all samples and heads.

    Args:
        sees: (query positions, key positions) -> whether the query sees the key.
        length: number of positions.
        device: device of queries, keys and values.
        block: queries and keys per block; a block is computed if any of its pairs is visible.
    """

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query, key)

    return create_block_mask(mask, None, None, length, length, device=str(device), BLOCK_SIZE=block)
