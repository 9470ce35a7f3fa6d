"""PowerSGD as Ramesh et al. 2021 ran it (appendix E.2): gradients averaged as products of two thin matrices.

Steps carry the numbers of that description. All of it is a function of gradients, a state and process groups; whoever
trains, drives it: `compress` a block when its gradients are there, `reduce_others` once, `agree` once, then `finish`.

    G  a matrix' gradient on this machine, (rows, columns), rows <= columns
    E  G + what earlier steps left over, this machine's term of the sum
    Q  (columns, r) Gaussian, fixed        P  (rows, r) sum of E Q, then its orthonormal basis
    Q' (columns, r) sum of E^T P           D  P Q'^T, what stands for the sum of E
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipes.algorithms.powersgd.orthogonal import orthonormal
from recipes.algorithms.powersgd.wire import all_reduce_sum, bytes_sent, magnitude
from recipes.algorithms.sixteen_bit.formats import MEAN_1_6_9, Format


@dataclass
class BlockState:
    """What a block keeps from step to step.

    Attributes:
        projections: Q of each matrix, (columns, r) float32.
        errors: what has not been sent of each matrix, (rows, columns), in the buffer's format.
    """

    projections: list[Tensor]
    errors: list[Tensor]


@dataclass
class Compressed:
    """A block between `compress` and `finish`.

    Attributes:
        gradients: as they were given; D is written into them.
        terms: E of each matrix, in its gradient's memory where that can be seen as (rows, columns).
        bases: orthonormal P, (rows, r).
        factors: Q', (columns, r).
        finite: (3,) bool: gradients, P and Q' of this machine, before anything was clamped.
        largest: (2,) magnitudes of the sums P and Q' on the wire; at the format's largest value they were clamped.
    """

    gradients: list[Tensor]
    terms: list[Tensor]
    bases: list[Tensor]
    factors: list[Tensor]
    finite: Tensor
    largest: Tensor


@dataclass
class Agreement:
    """What all machines and shards know alike after step 6.

    Attributes:
        norm: scalar, of the whole averaged gradient; infinite where any shard of any machine saw what is not finite.
        sent: (blocks,) bool: P and Q' of the block were finite on all machines of this ordinal.
    """

    norm: Tensor
    sent: Tensor


class LowRank:
    """The compressor.

    Gradients are this machine's terms of the averaged gradient times a scale: where each machine has the gradient of
    its own mean loss, the scale is the number of machines.
    """

    def __init__(
        self,
        rank: int,
        *,
        seed: int = 0,
        wire: Format = MEAN_1_6_9,
        buffer: Format = MEAN_1_6_9,
        p_scale: float = 1.0,
        q_scale: float = 1.0,
        identity: float = 1e-6,
    ) -> None:
        """
        Args:
            rank: columns of P and Q; a matrix with fewer rows has as many as rows.
            seed: of Q.
            wire: format in which P and Q' travel.
            buffer: format of the errors.
            p_scale: what P is multiplied by on the wire, to lie in the format's range.
            q_scale: the same for Q'.
            identity: what is added to P's diagonal, so that no matrix lacks a basis.
        """
        self.rank = rank
        self.seed = seed
        self.wire = wire
        self.buffer = buffer
        self.p_scale = p_scale
        self.q_scale = q_scale
        self.identity = identity

    def new_state(self, shapes: Sequence[torch.Size], device: torch.device, number: int) -> BlockState:
        """A block's state before the first step: Q drawn on the CPU, the same on every machine.

        Args:
            shapes: of its gradients, two dimensions or more; all but the first are one.
            device: of its gradients.
            number: the block's, which makes its Q its own.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        state = BlockState([], [])
        for shape in shapes:
            rows, columns = _sides(shape)
            rank = min(self.rank, rows)
            state.projections.append(torch.randn(columns, rank, generator=generator).to(device))
            state.errors.append(self.buffer.encode(torch.zeros(rows, columns, device=device)))
        return state

    @torch.no_grad()
    def compress(self, gradients: list[Tensor], scale: float, state: BlockState, group: ProcessGroup) -> Compressed:
        """Steps 1 to 4. The gradients' memory is used; they are averaged once `finish` has run.

        Args:
            gradients: this rank's part of the block's gradients, float32.
            scale: what divides them: the block's gradient scale, in which the number of machines is a factor.
            state: of the block, left as it is.
            group: this ordinal's ranks of all machines.
        """
        terms, finite = [], []
        for gradient, error in zip(gradients, state.errors, strict=True):  # 1
            matrix = as_matrix(gradient)
            finite.append(torch.isfinite(magnitude(matrix)))
            matrix.masked_fill_(~finite[-1], 0.0)  # the error stays alone: this update will be skipped
            terms.append(matrix.div_(scale).add_(self.buffer.decode(error)))
        products = [e @ q for e, q in zip(terms, state.projections, strict=True)]  # 2
        products, p_finite, p_largest = self._sum(products, group, self.p_scale)
        for p in products:  # 3
            p.diagonal().add_(self.identity)
        bases = orthonormal(products)
        factors = [e.T @ p for e, p in zip(terms, bases, strict=True)]  # 4
        factors, q_finite, q_largest = self._sum(factors, group, self.q_scale)
        flags = torch.stack([torch.stack(finite).all(), p_finite, q_finite])
        return Compressed(gradients, terms, bases, factors, flags, torch.stack([p_largest, q_largest]))

    def _sum(self, matrices: list[Tensor], group: ProcessGroup, scale: float) -> tuple[list[Tensor], Tensor, Tensor]:
        """A block's matrices in one message; whether this machine's were finite, and the largest sum on the wire."""
        flat, finite = all_reduce_sum(torch.cat([m.flatten() for m in matrices]), group, self.wire, scale)
        parts = flat.split([m.numel() for m in matrices])
        return [part.view_as(m) for part, m in zip(parts, matrices, strict=True)], finite, magnitude(flat) * scale

    @torch.no_grad()
    def finish(
        self, block: Compressed, sent: Tensor, state: BlockState, machines: int, factor: Tensor | None = None
    ) -> None:
        """Steps 7 and 8: D into the gradients, and what it lacks of E into the errors.

        Args:
            block: from `compress`.
            sent: bool scalar, the block's of `Agreement.sent`.
            state: of the block; its errors are replaced.
            machines: how many share the error of D.
            factor: scalar that clips D, or None. The error is that of D before it is clipped.
        """
        pairs = zip(block.terms, block.bases, block.factors, strict=True)
        for number, (term, p, q) in enumerate(pairs):
            decompressed = p @ q.T  # 7
            state.errors[number] = self._error(term, decompressed / machines, sent)  # 8
            gradient = block.gradients[number]
            averaged = decompressed if factor is None else decompressed * factor
            gradient.copy_(from_matrix(averaged, gradient.shape))

    def _error(self, term: Tensor, sent_part: Tensor, sent: Tensor) -> Tensor:
        # Where P or Q' was not finite the whole term is left over, unless the buffer cannot hold it.
        holds = (term.abs() <= self.buffer.largest).all()
        kept = torch.where(holds, term, 0.0)
        return self.buffer.encode(torch.where(sent, term - sent_part, kept))

    # --- checkpoints: step 10 ------------------------------------------------------------------

    @torch.no_grad()
    def summed_errors(self, state: BlockState, group: ProcessGroup) -> list[Tensor]:
        """The sum of the machines' errors, (rows, columns) float32 each, the same on all: all that a checkpoint needs.

        Every rank of the group must call it.
        """
        sums = [self.buffer.decode(error).clone() for error in state.errors]
        for total in sums:
            dist.all_reduce(total, group=group)
        return sums

    @torch.no_grad()
    def load_errors(self, state: BlockState, sums: list[Tensor], machines: int) -> None:
        """Each machine takes its share of the sum, however many there were when it was written.

        Raises:
            ValueError: the sums have other shapes than the block's matrices.
        """
        for number, (error, total) in enumerate(zip(state.errors, sums, strict=True)):
            if error.shape != total.shape:
                raise ValueError(
                    f"powersgd: an error of shape {tuple(total.shape)} in the checkpoint is of another matrix than the "
                    f"model's of {tuple(error.shape)}"
                )
            state.errors[number] = self.buffer.encode(total.to(error.device, torch.float32) / machines)

    # --- what it costs -------------------------------------------------------------------------

    def bytes_sent(self, shapes: Sequence[torch.Size], machines: int) -> float:
        """Bytes a rank sends to other machines for these matrices in a step."""
        count = 0
        for shape in shapes:
            rows, columns = _sides(shape)
            count += min(self.rank, rows) * (rows + columns)
        return bytes_sent(count, machines, self.wire)


@torch.no_grad()
def reduce_others(gradients: list[Tensor], scale: float, group: ProcessGroup) -> None:
    """Step 5: gains, biases, embeddings and unembeddings summed in one 32-bit message, in place.

    Args:
        gradients: float32, of any shapes.
        scale: what divides them first.
        group: this ordinal's ranks of all machines.
    """
    if not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients]).div_(scale)
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def agree(
    blocks: list[Compressed], others: list[Tensor], group: ProcessGroup, shards: ProcessGroup | None = None
) -> Agreement:
    """Step 6: the norm of the averaged gradient without decompressing it, and what was not finite anywhere.

    P has orthonormal columns, so the norm of D is that of Q'.

    Args:
        blocks: all blocks of this rank.
        others: gradients that `reduce_others` has summed.
        group: this ordinal's ranks of all machines.
        shards: ranks of this machine that hold the other parts of the gradients; None: this rank has all.
    """
    flags = ~torch.stack([block.finite for block in blocks])  # (blocks, 3), true where not finite
    flags = flags.float()
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    parts = [q for block in blocks for q in block.factors] + others
    squared = torch.stack([part.square().sum() for part in parts]).sum()
    squared = torch.where(flags.any(), torch.inf, squared)
    if shards is not None:
        dist.all_reduce(squared, group=shards)
    # What is not finite among the others shows in the sum itself.
    norm = torch.where(torch.isfinite(squared), squared.sqrt(), torch.inf)
    if shards is not None:  # machines may have added their shards in another order, and must clip alike to the last bit
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
    return Agreement(norm, sent=flags[:, 1:].sum(1) == 0)


def as_matrix(gradient: Tensor) -> Tensor:
    """(rows, columns), in the gradient's memory where its order allows. The lesser side comes first (step 9)."""
    matrix = gradient.flatten(1)
    return matrix.T if _is_tall(gradient.shape) else matrix


def from_matrix(matrix: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `as_matrix` for a gradient of that shape."""
    return (matrix.T if _is_tall(shape) else matrix).reshape(shape)


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix, the lesser first: orthogonalising is cheap then."""
    rest = torch.Size(shape[1:]).numel()
    return min(shape[0], rest), max(shape[0], rest)


def _is_tall(shape: Sequence[int]) -> bool:
    return shape[0] > torch.Size(shape[1:]).numel()
