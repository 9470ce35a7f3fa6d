"""Orthonormal bases for PowerSGD's P: by Cholesky factors, which are fast, or by Householder reflections, always."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DEVIATION = 0.1  # of the first pass's columns from orthonormal ones, beyond which a second pass is not relied on


def cholesky_qr(matrices: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Bases of the column spaces of matrices by Cholesky-QR done twice (Fukaya et al. 2014, "CholeskyQR2").

    One pass multiplies a matrix by the inverse of its Gram matrix's Cholesky factor. What it lacks in orthogonality
    grows as the square of the condition number, and the second pass repairs it. Both are in 64-bit, so that they hold
    for all that 32-bit columns can represent, short of columns that depend on each other. Apart from the small factors
    all work is in matrix products, which run at the speed of the device, and are not subject to TF32. Matrices of the
    same shape are decomposed together, and the host waits for nothing.

    Args:
        matrices: (m, r) float32 or float64 each, with m >= r and finite values.

    Returns:
        (m, r) each, in the same dtype, and () bool: whether all of them are orthonormal to its precision. If not, use
        `householder`.
    """
    flags: list[Tensor] = []

    def twice(stack: Tensor) -> Tensor:
        first, one, _ = _pass(stack.double())
        second, two, deviation = _pass(first)
        # False for values that are not finite, too.
        flags.append((one == 0).all() & (two == 0).all() & (deviation < DEVIATION))
        return second.to(stack.dtype)

    found = _by_shape(matrices, twice)
    good = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=matrices[0].device)
    return found, good


def _pass(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n, m, r) -> the same times the inverse of R, where R^T R is its Gram matrix.

    Also returns (n,) int, not 0 where there is no such R, and (), the largest deviation of the Gram matrix from I.
    """
    gram = stack.mT @ stack  # (n, r, r)
    unit = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lower, info = torch.linalg.cholesky_ex(gram)  # R^T
    inverse = torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False)
    return stack @ inverse.mT, info, (gram - unit).abs().amax()


def householder(matrices: list[Tensor]) -> list[Tensor]:
    """Bases of the column spaces of matrices: the Q of QR decompositions by Householder reflections.

    Columns are orthonormal to the precision of their dtype, even if the columns of the matrix are nearly dependent.
    Gram-Schmidt loses orthogonality as the condition number grows, which broke PowerSGD for Ramesh et al. (2021).
    `torch.geqrf` calls LAPACK or cuSOLVER, which on a GPU take one matrix and one block of columns after another.

    Args:
        matrices: (m, r) float32 or float64 each, with m >= r and finite values.

    Returns:
        (m, r) each, in the same dtype.
    """
    return _by_shape(matrices, lambda stack: torch.linalg.householder_product(*torch.geqrf(stack)))


def _by_shape(matrices: list[Tensor], decompose: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The bases of matrices, with those of the same shape decomposed as one stack, (n, m, r) -> (n, m, r)."""
    places: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        assert matrix.shape[0] >= matrix.shape[1], f"{tuple(matrix.shape)}: more columns than rows"
        if matrix.numel():  # a shard may be empty
            places.setdefault(matrix.shape, []).append(number)
    found = list(matrices)
    for numbers in places.values():
        for i, basis in zip(numbers, decompose(torch.stack([matrices[i] for i in numbers])), strict=True):
            found[i] = basis
    return found
