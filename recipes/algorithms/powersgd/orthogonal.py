"""Orthonormal bases by Householder reflections, for PowerSGD's P."""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormal(matrices: list[Tensor]) -> list[Tensor]:
    """Orthonormal bases of the column spaces of matrices: the Q of QR decompositions by Householder reflections.

    Columns are orthonormal to the precision of 32-bit floats, even if the columns of the matrix are nearly dependent.
    Gram-Schmidt loses orthogonality as the condition number grows, which broke PowerSGD for Ramesh et al. (2021).
    `torch.geqrf` calls LAPACK or cuSOLVER. Matrices of the same shape are decomposed together.

    Args:
        matrices: (m, r) float32 each, with m >= r and finite values.

    Returns:
        (m, r) float32 each.
    """
    places: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        assert matrix.shape[0] >= matrix.shape[1], f"{tuple(matrix.shape)}: more columns than rows"
        if matrix.numel():  # a shard may be empty
            places.setdefault(matrix.shape, []).append(number)
    found = list(matrices)
    for numbers in places.values():
        reflectors, scales = torch.geqrf(torch.stack([matrices[i] for i in numbers]))
        for i, basis in zip(numbers, torch.linalg.householder_product(reflectors, scales), strict=True):
            found[i] = basis
    return found
