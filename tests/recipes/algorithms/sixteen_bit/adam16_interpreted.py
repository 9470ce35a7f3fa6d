"""Adam16's Triton kernel on the CPU, against the plain update. Run by tests/recipes/test_kernels.py."""

import pytest
import torch

from recipes.algorithms.sixteen_bit import adam16_kernel
from recipes.algorithms.sixteen_bit.adam16 import FORMATS, adamw_update

SIZES = (1, 7, 1024, 8192, 20000)


def case(bits, size, seed):
    """Moments that earlier steps left: any codes."""
    generator = torch.Generator().manual_seed(seed)

    def wide(low, high):
        exponents = torch.randint(low, high, (size,), generator=generator)
        return torch.randn(size, generator=generator) * 2.0**exponents

    mean, variance = wide(-70, 3), wide(-72, 2).abs()
    codes = [fmt.encode(moment) for fmt, moment in zip(FORMATS[bits], (mean, variance), strict=True)]
    return (torch.randn(size, generator=generator), wide(-40, 5), *codes)


@pytest.mark.parametrize("clip", [5.0, None])
@pytest.mark.parametrize("bits", [16, 32])
def test_one_launch_is_the_plain_update_of_each_tensor(bits, clip):
    ours = [case(bits, size, number) for number, size in enumerate(SIZES)]
    ours.append(tuple(t[1:] for t in case(bits, 1025, len(SIZES))))  # at addresses that 16 does not divide
    plain = [tuple(t.clone() for t in parts) for parts in ours]
    before = [(parts[0].clone(), parts[2].clone()) for parts in ours]
    scalars = (2e-5, 5e-3, 0.2)
    adam16_kernel.update_all(ours, scalars, FORMATS[bits], (0.9, 0.96), 1e-8, clip)
    for parts in plain:
        adamw_update(*parts, *(torch.tensor(x) for x in scalars), *FORMATS[bits], 0.9, 0.96, 1e-8, clip)
    for (old, old_mean), found, wanted in zip(before, ours, plain, strict=True):
        change = (wanted[0] - old).abs().max()
        # Where a mean and a gradient cancel, what is left is as exact as they were.
        size = FORMATS[bits][0].decode(old_mean).abs() + wanted[1].abs() + wanted[1].square()
        assert (found[0] - wanted[0]).abs().max() < 1e-5 * change + 1e-7
        for fmt, a, b in zip(FORMATS[bits], found[2:], wanted[2:], strict=True):
            if bits == 32:
                assert ((a - b).abs() <= 1e-6 * size).all()
                continue
            # Sums that differ in the last place of 32 bits may fall on either side of a rounding, rarely.
            assert (a.int() - b.int()).abs().max() <= 1
            assert (a != b).float().mean() < 2e-3 or len(a) < 2000
            assert fmt.decode(a).isfinite().all()


@pytest.mark.parametrize("number", [0, 1])
def test_formats_are_the_same_to_the_bit(number):
    """A step that changes nothing (betas of 1, no clip) decodes and encodes all codes."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    moments = [torch.zeros(2**16, dtype=torch.int16), torch.zeros(2**16, dtype=torch.int16)]
    moments[number] = codes.clone()
    parts = (torch.zeros(2**16), torch.zeros(2**16), *moments)
    adam16_kernel.update_all([parts], (0.0, 0.0, 1.0), FORMATS[16], (1.0, 1.0), 1e-8, None)
    if number == 0:
        codes[codes == -(2**15)] = 0  # adding a gradient of zero to -0 gives 0
    assert torch.equal(parts[2 + number], codes)


def test_nan_gradients_reach_the_parameter():
    """As in AdamW: whoever wants to skip an update looks before."""
    values, gradient = torch.zeros(4), torch.tensor([1.0, float("nan"), -1.0, 0.0])
    codes = [torch.zeros(4, dtype=torch.int16) for _ in range(2)]
    adam16_kernel.update_all([(values, gradient, *codes)], (0.0, 0.1, 0.2), FORMATS[16], (0.9, 0.96), 1e-8, 5.0)
    assert values.isnan().tolist() == [False, True, False, False]
