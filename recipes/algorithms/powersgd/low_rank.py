"""PowerSGD as in Ramesh et al. 2021, appendix E.2: gradients averaged as products of two low-rank factors.

Steps are numbered as in that description. The code here depends only on gradients, a state and process groups. Its
caller runs `compress` for each block whose gradients are complete, then `repair`, `reduce_others` and `agree` once
each, and `finish` for each block. Numbers are computed in 32 bits (in training, GPUs multiply in TF32), and those of
64-bit gradients in 64 bits.

    G  gradient of a matrix on this machine, (rows, columns) with rows <= columns
    E  G + the error of earlier steps: the term of this machine in the sum
    Q  (columns, r) Gaussian, fixed        P  (rows, r) sum of E Q, then its orthonormal basis
    Q' (columns, r) sum of E^T P           D  P Q'^T, the approximation of the sum of E
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipes.algorithms.powersgd.all_reduce import all_reduce_sum, bytes_sent, magnitude
from recipes.algorithms.powersgd.orthogonal import cholesky_qr, householder
from recipes.algorithms.sixteen_bit.formats import MEAN_1_6_9, Format


@dataclass
class BlockState:
    """The state of a block, kept from step to step.

    Attributes:
        projections: Q of each matrix, (columns, r), in the dtype in which the block is computed.
        errors: error of the compression of each matrix, (rows, columns), in the format of the buffer.
    """

    projections: list[Tensor]
    errors: list[Tensor]


@dataclass
class Compressed:
    """A block between `compress` and `finish`.

    Attributes:
        gradients: the arguments of `compress`; D is written into them.
        terms: E of each matrix, in the memory of its gradient if that can be viewed as (rows, columns).
        bases: orthonormal P of each matrix, (rows, r).
        factors: Q' of each matrix, (columns, r).
        orthonormal: () bool, whether the bases are orthonormal. If not, `LowRank.repair` makes others.
        finite: (3,) bool, whether gradients, P and Q' of this machine were finite before they were clamped.
        largest: (2,) largest magnitudes of the sums P and Q' on the wire; if equal to the largest value of the format,
            they were clamped.
    """

    gradients: list[Tensor]
    terms: list[Tensor]
    bases: list[Tensor]
    factors: list[Tensor]
    orthonormal: Tensor
    finite: Tensor
    largest: Tensor


@dataclass
class Agreement:
    """What all ranks have agreed on after step 6.

    Attributes:
        norm: scalar, the norm of the whole averaged gradient; infinite if any rank found values that are not finite.
        sent: (blocks,) bool, whether P and Q' of the block were finite on all ranks of `agree`'s group.
    """

    norm: Tensor
    sent: Tensor


class LowRank:
    """The compressor.

    Its input is this machine's term of the averaged gradient times a scale. If each machine has the gradient of its own
    mean loss, the scale is the number of machines.
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
        cholesky: bool | None = None,
    ) -> None:
        """
        Args:
            rank: number of columns of P and Q, which is reduced to the number of rows for matrices with fewer rows.
            seed: seed of Q.
            wire: format in which P and Q' are sent.
            buffer: format of the errors.
            p_scale: factor of P on the wire, which brings it into the range of the format.
            q_scale: the same for Q'.
            identity: added to the diagonal of P, so that every matrix has a basis.
            cholesky: orthogonalise P by Cholesky factors, and by Householder reflections only where those fail. None:
                on a GPU. A CPU is faster with reflections.
        """
        self.rank = rank
        self.seed = seed
        self.wire = wire
        self.buffer = buffer
        self.p_scale = p_scale
        self.q_scale = q_scale
        self.identity = identity
        self.cholesky = cholesky

    def new_state(
        self, shapes: Sequence[torch.Size], device: torch.device, number: int, dtype: torch.dtype = torch.float32
    ) -> BlockState:
        """The state of a block before the first step. Q is drawn on the CPU, and equal on all machines.

        Args:
            shapes: shapes of its gradients, with two or more dimensions; all but the first are flattened.
            device: device of its gradients.
            number: number of the block, from which its Q is seeded.
            dtype: of its gradients, float32 or float64, in which the block is computed.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        state = BlockState([], [])
        for shape in shapes:
            rows, columns = _sides(shape)
            rank = min(self.rank, rows)
            state.projections.append(torch.randn(columns, rank, generator=generator).to(device, dtype))
            state.errors.append(self.buffer.encode(torch.zeros(rows, columns, device=device, dtype=dtype)))
        return state

    @torch.no_grad()
    def compress(self, gradients: list[Tensor], scale: float, state: BlockState, group: ProcessGroup) -> Compressed:
        """Steps 1 to 4. The memory of the gradients is overwritten; `finish` writes the average into it.

        Args:
            gradients: this rank's shards of the gradients of the block, in the dtype of its state.
            scale: divisor of the gradients: the number of machines, times a gradient scale if there is one.
            state: state of the block, not changed.
            group: the ranks that hold the same shards, one per machine.
        """
        terms, finite = [], []
        for gradient, error in zip(gradients, state.errors, strict=True):  # 1
            matrix = as_matrix(gradient)
            finite.append(torch.isfinite(magnitude(matrix)))
            matrix.masked_fill_(~finite[-1], 0.0)  # only the error is kept, because this update will be skipped
            terms.append(matrix.div_(scale).add_(self.buffer.decode(error)))
        cholesky = self._by_cholesky(gradients[0].device)
        return self._factored(gradients, terms, torch.stack(finite).all(), state, group, cholesky)

    @torch.no_grad()
    def repair(self, blocks: list[Compressed], states: list[BlockState], group: ProcessGroup) -> list[int]:
        """Repeat steps 2 to 4 by Householder reflections for blocks whose bases are not orthonormal, in place.

        That happens if columns of P depend on each other. Ranks of a group have the same P, and agree nonetheless, so
        that devices may round differently. On a GPU, the host waits here for all blocks to be compressed.

        Returns:
            The numbers of these blocks.
        """
        if not blocks or not self._by_cholesky(blocks[0].orthonormal.device):
            return []
        bad = 1.0 - torch.stack([block.orthonormal for block in blocks]).float()
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        numbers = [number for number, is_bad in enumerate(bad.tolist()) if is_bad]
        for number in numbers:
            b = blocks[number]
            blocks[number] = self._factored(b.gradients, b.terms, b.finite[0], states[number], group, cholesky=False)
        return numbers

    def _by_cholesky(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.cholesky is None else self.cholesky

    def _factored(
        self,
        gradients: list[Tensor],
        terms: list[Tensor],
        finite: Tensor,
        state: BlockState,
        group: ProcessGroup,
        cholesky: bool,
    ) -> Compressed:
        products = [e @ q for e, q in zip(terms, state.projections, strict=True)]  # 2
        products, p_finite, p_largest = self._sum(products, group, self.p_scale)
        for p in products:  # 3
            p.diagonal().add_(self.identity)
        bases, good = cholesky_qr(products) if cholesky else (householder(products), torch.ones_like(finite))
        factors = [e.T @ p for e, p in zip(terms, bases, strict=True)]  # 4
        factors, q_finite, q_largest = self._sum(factors, group, self.q_scale)
        flags = torch.stack([finite, p_finite, q_finite])
        return Compressed(gradients, terms, bases, factors, good, flags, torch.stack([p_largest, q_largest]))

    def _sum(self, matrices: list[Tensor], group: ProcessGroup, scale: float) -> tuple[list[Tensor], Tensor, Tensor]:
        """Sums of matrices in one message, whether this machine's were finite, and the largest sum on the wire."""
        flat, finite = all_reduce_sum(torch.cat([m.flatten() for m in matrices]), group, self.wire, scale)
        parts = flat.split([m.numel() for m in matrices])
        return [part.view_as(m) for part, m in zip(parts, matrices, strict=True)], finite, magnitude(flat) * scale

    @torch.no_grad()
    def finish(
        self, block: Compressed, sent: Tensor, state: BlockState, machines: int, factor: Tensor | None = None
    ) -> None:
        """Steps 7 and 8: write D into the gradients, and the difference between E and D into the errors.

        Args:
            block: from `compress`.
            sent: () bool, the element of `Agreement.sent` for the block.
            state: state of the block; its errors are replaced.
            machines: number of machines, over which D is divided in the errors.
            factor: scalar by which D is multiplied for clipping, or None. Errors are those of D before clipping.
        """
        pairs = zip(block.terms, block.bases, block.factors, strict=True)
        for number, (term, p, q) in enumerate(pairs):
            decompressed = p @ q.T  # 7
            state.errors[number] = self._error(term, decompressed / machines, sent)  # 8
            gradient = block.gradients[number]
            averaged = decompressed if factor is None else decompressed * factor
            gradient.copy_(from_matrix(averaged, gradient.shape))

    def _error(self, term: Tensor, sent_part: Tensor, sent: Tensor) -> Tensor:
        # If P or Q' was not finite, the whole term remains as error, unless the buffer cannot represent it.
        holds = (term.abs() <= self.buffer.largest).all()
        kept = torch.where(holds, term, 0.0)
        return self.buffer.encode(torch.where(sent, term - sent_part, kept))

    # --- checkpoints: step 10 ------------------------------------------------------------------

    @torch.no_grad()
    def summed_errors(self, state: BlockState, group: ProcessGroup) -> list[Tensor]:
        """The sum of the errors of all machines, each (rows, columns) and equal on all ranks, for checkpoints.

        Every rank of the group must call it.
        """
        # NCCL takes contiguous tensors, and errors have the strides of their gradient, whose matrix may be a transpose.
        sums = [self.buffer.decode(error).clone(memory_format=torch.contiguous_format) for error in state.errors]
        for total in sums:
            dist.all_reduce(total, group=group)
        return sums

    @torch.no_grad()
    def load_errors(self, state: BlockState, sums: list[Tensor], machines: int) -> None:
        """Restore errors from `summed_errors`: each of any number of machines takes an equal share.

        Raises:
            ValueError: the sums do not have the shapes of the block's matrices.
        """
        parts = zip(state.errors, state.projections, sums, strict=True)
        for number, (error, q, total) in enumerate(parts):
            if error.shape != total.shape:
                raise ValueError(
                    f"powersgd: an error in the checkpoint has shape {tuple(total.shape)}, but the matrix "
                    f"of the model has {tuple(error.shape)}"
                )
            state.errors[number] = self.buffer.encode(total.to(q) / machines)

    # --- cost ----------------------------------------------------------------------------------

    def factor_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """Memory of a rank for the 32-bit factors of matrices of these shapes: Q, and P and Q' until `finish`."""
        sides = map(_sides, shapes)
        return sum(4 * min(self.rank, rows) * (rows + 2 * columns) for rows, columns in sides)

    def bytes_sent(self, shapes: Sequence[torch.Size], machines: int) -> float:
        """Bytes that a rank sends to other machines per step for matrices of these shapes."""
        count = 0
        for shape in shapes:
            rows, columns = _sides(shape)
            count += min(self.rank, rows) * (rows + columns)
        return bytes_sent(count, machines, self.wire)


@torch.no_grad()
def reduce_others(gradients: list[Tensor], scale: float, group: ProcessGroup) -> None:
    """Step 5: gains, biases, embeddings and unembeddings summed in one message, in place, in their own dtype.

    Args:
        gradients: float32 or float64, of any shapes.
        scale: divisor of the gradients before they are summed.
        group: the ranks that hold the same shards, one per machine.
    """
    if not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients]).div_(scale)
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def agree(
    blocks: list[Compressed],
    others: list[Tensor],
    group: ProcessGroup,
    shards: ProcessGroup | None = None,
    copies: Sequence[int] | None = None,
) -> Agreement:
    """Step 6: the norm of the averaged gradient without decompressing it, and whether anything was not finite.

    Because the columns of P are orthonormal, the norm of D is that of Q'.

    Args:
        blocks: all blocks of this rank.
        others: gradients that `reduce_others` has summed.
        group: the ranks that hold the same shards, one per machine.
        shards: the ranks of this machine, which hold the other shards of the gradients; None: there are none.
        copies: for each of `others`, the number of those ranks that hold the same values; None: 1.
    """
    flags = ~torch.stack([block.finite for block in blocks])  # (blocks, 3), true if not finite
    flags = flags.float()
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    squares = [q.square().sum() for block in blocks for q in block.factors]
    squares += [other.square().sum() / n for other, n in zip(others, copies or [1] * len(others), strict=True)]
    squared = torch.stack(squares).sum()
    squared = torch.where(flags.any(), torch.inf, squared)
    if shards is not None:
        dist.all_reduce(squared, group=shards)
    # Values of the other parameters that are not finite show in the sum itself.
    norm = torch.where(torch.isfinite(squared), squared.sqrt(), torch.inf)
    if shards is not None:  # machines may add in different orders, and must clip equally to the last bit
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
    return Agreement(norm, sent=flags[:, 1:].sum(1) == 0)


def as_matrix(gradient: Tensor) -> Tensor:
    """A gradient as (rows, columns), the shorter side first (step 9); a view of the gradient if its strides allow."""
    matrix = gradient.flatten(1)
    return matrix.T if _is_tall(gradient.shape) else matrix


def from_matrix(matrix: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `as_matrix` for a gradient of that shape."""
    return (matrix.T if _is_tall(shape) else matrix).reshape(shape)


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix, the shorter side first, which makes orthogonalisation cheap."""
    rest = torch.Size(shape[1:]).numel()
    return min(shape[0], rest), max(shape[0], rest)


def _is_tall(shape: Sequence[int]) -> bool:
    return shape[0] > torch.Size(shape[1:]).numel()
