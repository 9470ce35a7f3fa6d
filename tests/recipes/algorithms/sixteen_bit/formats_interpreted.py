"""The formats' Triton kernels on the CPU, against the plain arithmetic. Run by tests/recipes/test_kernels.py."""

import pytest
import torch

from recipes.algorithms.sixteen_bit import formats_kernel
from recipes.algorithms.sixteen_bit.formats import MEAN_1_6_9, VARIANCE_0_6_10

FORMATS = pytest.mark.parametrize("fmt", [MEAN_1_6_9, VARIANCE_0_6_10], ids=lambda fmt: fmt.name)


def all_codes():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@FORMATS
def test_every_code_is_decoded_and_encoded(fmt):
    values = formats_kernel.decode(all_codes(), fmt.constants)
    assert torch.equal(values.view(torch.int32), fmt.decode(all_codes()).view(torch.int32))
    assert torch.equal(formats_kernel.encode(values, fmt.constants), fmt.encode(values))


@FORMATS
def test_values_between_codes_are_rounded_alike(fmt):
    generator = torch.Generator().manual_seed(0)
    codes = fmt.decode(all_codes()).sort().values
    halfway = (codes[1:] + codes[:-1]) / 2
    wide = torch.randn(5000, generator=generator) * 2.0 ** torch.randint(-150, 10, (5000,), generator=generator)
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3e38, -3e38])
    for values in (halfway, halfway.nextafter(codes[1:]), halfway.nextafter(codes[:-1]), wide, odd):
        assert torch.equal(formats_kernel.encode(values, fmt.constants), fmt.encode(values))


@FORMATS
def test_any_order_of_memory(fmt):
    values = torch.randn(6, 5, 40, generator=torch.Generator().manual_seed(0))
    for view in (values.transpose(0, 2), values[:, 1:4], values[..., ::3], values[:0], values[2, 3, 7]):
        codes = formats_kernel.encode(view, fmt.constants)
        assert torch.equal(codes, fmt.encode(view.contiguous()))
        assert torch.equal(formats_kernel.decode(codes, fmt.constants), fmt.decode(codes))
    gaps = fmt.encode(values)[:, ::2]
    assert torch.equal(formats_kernel.decode(gaps, fmt.constants), fmt.decode(gaps))
