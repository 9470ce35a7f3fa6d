"""Orthonormal columns by Householder reflections, for PowerSGD's P."""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormal(matrices: list[Tensor]) -> list[Tensor]:
    """Bases of the matrices' column spaces: the Q of their QR decompositions, by Householder reflections.

    The columns come out orthonormal to the precision of 32-bit floats however dependent the matrix's columns are, where
    Gram-Schmidt loses it with the condition number (Ramesh et al. 2021 saw PowerSGD break by it). `torch.geqrf` is
    LAPACK's and cuSOLVER's Householder decomposition. Matrices of one shape go through it together.

    Args:
        matrices: (m, r) float32 each, m >= r, finite.

    Returns:
        (m, r) float32 each.
    """
    places: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        assert matrix.shape[0] >= matrix.shape[1], f"{tuple(matrix.shape)}: more columns than rows"
        if matrix.numel():  # a shard may have no rows
            places.setdefault(matrix.shape, []).append(number)
    found = list(matrices)
    for numbers in places.values():
        reflectors, scales = torch.geqrf(torch.stack([matrices[i] for i in numbers]))
        for i, basis in zip(numbers, torch.linalg.householder_product(reflectors, scales), strict=True):
            found[i] = basis
    return found
