"""Bases of nearly dependent columns, compared with 64-bit arithmetic and with Gram-Schmidt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.algorithms.powersgd.orthogonal import cholesky_qr, householder


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
    "spectrum over 7 decades": falling(96, 24, 7),
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


def by_cholesky(matrices):
    bases, good = cholesky_qr(matrices)
    assert good
    return bases


BOTH = [householder, by_cholesky]


@pytest.mark.parametrize("name", ILL)
def test_columns_are_orthonormal_where_gram_schmidt_fails(name):
    matrix = ILL[name]
    assert torch.linalg.cond(matrix.double()) > 1e5
    ((by_factors,), good), (by_reflections,) = cholesky_qr([matrix]), householder([matrix])
    # The condition number of hilbert, 4e8, is more than two passes repair. Sums in another order must not decide.
    orders = [torch.randperm(len(matrix), generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    assert {good.item(), *(cholesky_qr([matrix[rows]])[1].item() for rows in orders)} == {name != "hilbert"}
    for basis in (by_reflections, by_factors) if good else (by_reflections,):
        assert defect(basis) < 1e-6  # some roundings of 6e-8
        assert missed(basis, matrix) < 1e-6
    assert defect(classical(matrix)) > 0.1  # columns that lean on each other by more than six degrees
    assert defect(modified(matrix)) > 1e-3


@pytest.mark.parametrize("orthonormal", BOTH)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_it_is_the_decomposition_in_64_bit(orthonormal, dtype, tolerance):
    """Where the condition number leaves digits: the same columns, up to their sign."""
    matrix = falling(96, 24, 2).to(dtype)
    (basis,) = orthonormal([matrix])
    exact, _ = torch.linalg.qr(matrix.double())
    assert basis.dtype == dtype
    # The condition, 1e2, times the dtype's rounding, times some.
    assert (basis * (basis * exact).sum(0).sign() - exact).abs().max() < tolerance


@pytest.mark.parametrize("orthonormal", BOTH)
def test_a_zero_matrix_with_the_small_identity_gives_a_basis(orthonormal):
    """What PowerSGD's step 3 is for: no gradient at all."""
    (basis,) = orthonormal([torch.eye(8, 3) * 1e-6])
    assert defect(basis) < 1e-6


@pytest.mark.parametrize("orthonormal", BOTH)
def test_matrices_of_many_shapes_together_are_as_each_alone(orthonormal):
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in ((8, 3), (5, 5), (8, 3), (7, 1), (0, 0))]
    for matrix, basis in zip(matrices, orthonormal(matrices), strict=True):
        assert basis.shape == matrix.shape
        if matrix.numel():
            torch.testing.assert_close(basis, orthonormal([matrix])[0], rtol=0, atol=1e-6)
            assert defect(basis) < 1e-6 and missed(basis, matrix) < 1e-6


def dependent(rows, columns, exponent, seed):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    matrix[:, columns // 2] = matrix[:, 0]  # two equal columns
    return matrix


SIZES = {"rows": st.integers(1, 12), "columns": st.integers(1, 12), "exponent": st.integers(-60, 3)}


@given(seed=st.integers(0, 10**6), **SIZES)
@settings(max_examples=50)
def test_householder_takes_any_finite_matrix(seed, rows, columns, exponent):
    (basis,) = householder([dependent(rows, min(rows, columns), exponent, seed)])
    assert defect(basis) < 2e-6


@given(seed=st.integers(0, 10**6), equal=st.booleans(), **SIZES)
@settings(max_examples=50)
def test_cholesky_factors_say_when_they_do_not_suffice(seed, equal, rows, columns, exponent):
    """Roundings may tell equal columns apart or not; what counts is that a bad basis never passes as a good one."""
    columns = min(rows, columns)
    matrix = dependent(rows, columns, exponent, seed)
    if not equal:
        matrix = matrix + torch.eye(rows, columns) * 2.0**exponent
    (basis,), good = cholesky_qr([matrix])
    if good:
        assert defect(basis) < 1e-6 and missed(basis, matrix) < 1e-6


def test_dependent_columns_are_not_for_cholesky_factors():
    good = torch.eye(6, 3)
    for bad in (torch.zeros(6, 3), torch.ones(6, 3), torch.full((6, 3), torch.nan)):
        assert cholesky_qr([good])[1] and not cholesky_qr([bad])[1] and not cholesky_qr([good, bad])[1]
        assert not cholesky_qr([good, bad[:5]])[1] and not cholesky_qr([bad[:5], good])[1]  # of other shapes
    assert cholesky_qr([torch.zeros(0, 0)])[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", ILL)
def test_on_a_gpu_columns_are_orthonormal(name, tf32):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32  # pytest's monkeypatch would delete it afterwards, which fails
    try:
        (by_factors,), good = cholesky_qr([ILL[name].cuda()])
        assert good == (name != "hilbert")
        for basis in (*householder([ILL[name].cuda()]), *([by_factors] if good else [])):
            assert defect(basis.cpu()) < 1e-5 and missed(basis.cpu(), ILL[name]) < 1e-5
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
