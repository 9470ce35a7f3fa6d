"""Householder bases of nearly dependent columns, compared with 64-bit arithmetic and with Gram-Schmidt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.algorithms.powersgd.orthogonal import orthonormal


def classical(matrix):
    """Gram-Schmidt: each column minus its projection on all earlier ones."""
    basis = torch.zeros_like(matrix)
    for j in range(matrix.shape[1]):
        column = matrix[:, j] - basis[:, :j] @ (basis[:, :j].T @ matrix[:, j])
        basis[:, j] = column / column.norm()
    return basis


def modified(matrix):
    """Gram-Schmidt that subtracts one projection after another."""
    basis = matrix.clone()
    for j in range(matrix.shape[1]):
        basis[:, j] /= basis[:, j].norm()
        basis[:, j + 1 :] -= basis[:, j : j + 1] @ (basis[:, j : j + 1].T @ basis[:, j + 1 :])
    return basis


def hilbert(rows, columns):
    i, j = torch.arange(rows).double(), torch.arange(columns).double()
    return (1 / (i[:, None] + j[None] + 1)).float()


def falling(rows, columns, decades):
    """A matrix whose singular values fall by `decades` powers of ten."""
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))
    return (left * torch.logspace(0, -decades, columns, dtype=torch.float64) @ right).float()


ILL = {
    "hilbert": hilbert(64, 12),
    "spectrum over 8 decades": falling(96, 24, 8),
    "equal columns": torch.ones(32, 4) + torch.eye(32, 4) * 1e-6,
}


def defect(basis):
    """Largest entry of Q^T Q - I, in 64-bit."""
    basis = basis.double()
    return (basis.T @ basis - torch.eye(basis.shape[1])).abs().max().item()


def missed(basis, matrix):
    """The part of the matrix outside the span of the basis, relative to its norm, in 64-bit."""
    basis, matrix = basis.double(), matrix.double()
    return ((matrix - basis @ (basis.T @ matrix)).norm() / matrix.norm()).item()


@pytest.mark.parametrize("name", ILL)
def test_columns_are_orthonormal_where_gram_schmidt_fails(name):
    matrix = ILL[name]
    assert torch.linalg.cond(matrix.double()) > 1e5
    (basis,) = orthonormal([matrix])
    found = {"householder": defect(basis), "classical": defect(classical(matrix)), "modified": defect(modified(matrix))}
    print(name, found)
    assert found["householder"] < 1e-6  # some roundings of 6e-8
    assert found["classical"] > 0.1  # columns that lean on each other by more than six degrees
    assert found["modified"] > 1e-3
    assert missed(basis, matrix) < 1e-6


def test_it_is_the_decomposition_in_64_bit():
    """Where the condition number leaves digits: the same columns, up to their sign."""
    matrix = falling(96, 24, 2)
    (basis,) = orthonormal([matrix])
    exact, _ = torch.linalg.qr(matrix.double())
    assert (basis * (basis * exact).sum(0).sign() - exact).abs().max() < 1e-4  # condition 1e2, times 6e-8, times some


def test_a_zero_matrix_with_the_small_identity_gives_a_basis():
    """What PowerSGD's step 3 is for: no gradient at all."""
    (basis,) = orthonormal([torch.eye(8, 3) * 1e-6])
    assert defect(basis) < 1e-6


def test_matrices_of_many_shapes_together_are_as_each_alone():
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in ((8, 3), (5, 5), (8, 3), (7, 1))]
    for matrix, basis in zip(matrices, orthonormal(matrices), strict=True):
        assert basis.shape == matrix.shape
        assert torch.equal(basis, orthonormal([matrix])[0])
        assert defect(basis) < 1e-6 and missed(basis, matrix) < 1e-6


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 12), columns=st.integers(1, 12), exponent=st.integers(-60, 3))
@settings(max_examples=50)
def test_any_finite_matrix(seed, rows, columns, exponent):
    columns = min(rows, columns)
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    matrix[:, columns // 2] = matrix[:, 0]  # two equal columns
    (basis,) = orthonormal([matrix])
    assert defect(basis) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ILL)
def test_on_a_gpu_columns_are_orthonormal(name):
    (basis,) = orthonormal([ILL[name].cuda()])
    assert defect(basis.cpu()) < 1e-5 and missed(basis.cpu(), ILL[name]) < 1e-5
