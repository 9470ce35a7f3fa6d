"""The 16-bit formats against exact rational numbers: every code, every midpoint, and any float."""

import functools
import math
import struct
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.algorithms.sixteen_bit.formats import FLOAT_32, MEAN_1_6_9, VARIANCE_0_6_10

FORMATS = pytest.mark.parametrize("fmt", [MEAN_1_6_9, VARIANCE_0_6_10], ids=lambda fmt: fmt.name)
ALL = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
# Sign, exponent and significand bits, and the bias: said again here, not read from the code under test.
LAYOUT = {"1-6-9": (1, 6, 9, 60), "0-6-10": (0, 6, 10, 61)}


def exact(name: str, code: int) -> Fraction:
    """A code's value by the definition of a floating-point format, from its 16 bits."""
    sign, exponents, significand, bias = LAYOUT[name]
    fraction = code & ((1 << significand) - 1)
    exponent = (code >> significand) & ((1 << exponents) - 1)
    leading = 0 if exponent == 0 else 1
    value = (leading + Fraction(fraction, 2**significand)) * Fraction(2) ** (max(exponent, 1) - bias)
    return -value if sign and code >> 15 else value


@functools.cache
def magnitudes_of(name: str) -> list[Fraction]:
    """The values of all codes without a sign."""
    return [exact(name, code) for code in range(2 ** (16 - LAYOUT[name][0]))]


def nearest(name: str, value: float) -> int:
    """The code that `value` must get, by comparing distances as fractions."""
    signed, magnitudes = LAYOUT[name][0], magnitudes_of(name)
    sign = 0x8000 if signed and math.copysign(1, value) < 0 else 0
    if math.isnan(value) or (not signed and value < 0):
        return sign
    if math.isinf(value) or abs(Fraction(value)) >= magnitudes[-1]:
        return sign | (len(magnitudes) - 1)
    size = abs(Fraction(value))
    above = bisect_left(magnitudes, size)
    if magnitudes[above] == size:
        return sign | above
    low, high = size - magnitudes[above - 1], magnitudes[above] - size
    if low == high:
        return sign | (above if above % 2 == 0 else above - 1)
    return sign | (above if high < low else above - 1)


def unsigned(codes: torch.Tensor) -> list[int]:
    return (codes.to(torch.int32) & 0xFFFF).tolist()


@FORMATS
def test_every_code_is_its_rational_number(fmt):
    values = fmt.decode(ALL)
    assert values.dtype == torch.float32
    for code, value in zip(unsigned(ALL), values.tolist(), strict=True):
        assert Fraction(value) == exact(fmt.name, code), hex(code)


@FORMATS
def test_every_code_comes_back(fmt):
    assert torch.equal(fmt.encode(fmt.decode(ALL)), ALL)  # the negative zero of 1-6-9 too


@FORMATS
def test_halfway_goes_to_the_even_code_and_its_neighbours_do_not(fmt):
    count = fmt.largest_code
    low, high = (fmt.decode(torch.arange(i, i + count, dtype=torch.int32).to(torch.int16)).double() for i in (0, 1))
    middle = ((low + high) / 2).float()
    assert torch.equal(middle.double(), (low + high) / 2)
    codes = torch.arange(count)
    assert unsigned(fmt.encode(middle)) == (codes + codes % 2).tolist()
    assert unsigned(fmt.encode(torch.nextafter(middle, torch.tensor(0.0)))) == codes.tolist()
    assert unsigned(fmt.encode(torch.nextafter(middle, torch.tensor(99.0)))) == (codes + 1).tolist()
    negative = (codes + codes % 2) | 0x8000 if LAYOUT[fmt.name][0] else codes * 0
    assert unsigned(fmt.encode(-middle)) == negative.tolist()


@FORMATS
def test_random_floats_get_the_nearest_code(fmt):
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (20000,), generator=generator).to(torch.int32).view(torch.float32)
    inside = torch.randn(20000, generator=generator) * 2.0 ** torch.randint(-75, 5, (20000,), generator=generator)
    values = torch.cat([anything, inside])
    wanted = [nearest(fmt.name, value) for value in values.tolist()]
    assert unsigned(fmt.encode(values)) == wanted
    assert len(set(wanted)) > 9000  # of 40,000 values many are out of range


@FORMATS
@given(bits=st.integers(0, 2**32 - 1))
def test_any_float_gets_the_nearest_code(fmt, bits):
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    assert unsigned(fmt.encode(torch.tensor([value]))) == [nearest(fmt.name, value)]


@FORMATS
@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=2))
def test_order_is_kept(fmt, values):
    ordered = torch.tensor(sorted(values))
    assert (fmt.decode(fmt.encode(ordered)).diff() >= 0).all()


def test_the_documented_extremes():
    assert (MEAN_1_6_9.largest, MEAN_1_6_9.least) == (16 - 2**-6, 2**-68)
    assert (VARIANCE_0_6_10.largest, VARIANCE_0_6_10.least) == (8 - 2**-8, 2**-70)
    assert MEAN_1_6_9.largest < 16 and VARIANCE_0_6_10.largest > 5
    infinity = float("inf")
    values = torch.tensor([infinity, -infinity, float("nan"), 3e38, -3e38, 16.0, 2.0**-69, 1e-40])
    largest = MEAN_1_6_9.largest
    assert MEAN_1_6_9.decode(MEAN_1_6_9.encode(values)).tolist() == [
        largest,
        -largest,
        0,
        largest,
        -largest,
        largest,
        0,
        0,
    ]
    largest = VARIANCE_0_6_10.largest
    assert VARIANCE_0_6_10.decode(VARIANCE_0_6_10.encode(values)).tolist() == [
        largest,
        0,
        0,
        largest,
        0,
        largest,
        2**-69,
        0,
    ]


@FORMATS
def test_shapes_strides_and_empty_tensors(fmt):
    values = torch.rand(3, 4, 5).permute(2, 0, 1)
    codes = fmt.encode(values)
    assert codes.shape == values.shape and codes.dtype == torch.int16
    assert torch.equal(codes.contiguous(), fmt.encode(values.contiguous()))
    assert torch.equal(codes, fmt.encode(values.double()))
    assert fmt.decode(fmt.encode(torch.empty(0, 3))).shape == (0, 3)


@FORMATS
def test_compiled_it_is_the_same_to_the_bit(fmt):
    floats = torch.randint(-(2**31), 2**31, (65536,), generator=torch.Generator().manual_seed(1))
    values = floats.to(torch.int32).view(torch.float32)
    codes, decoded = torch.compile(lambda v, c: (fmt.encode(v), fmt.decode(c)), dynamic=False)(values, ALL)
    assert torch.equal(codes, fmt.encode(values))
    assert torch.equal(decoded.view(torch.int32), fmt.decode(ALL).view(torch.int32))


def test_32_bit_floats_are_left_as_they_are():
    values = torch.tensor([1e-40, -0.0, float("inf"), 3.0])
    assert torch.equal(FLOAT_32.decode(FLOAT_32.encode(values)), values)
    assert math.isnan(FLOAT_32.encode(torch.tensor(float("nan"))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@FORMATS
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_is_the_same_to_the_bit(fmt, compiled):
    floats = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(1))
    values = floats.to(torch.int32).view(torch.float32)
    encode, decode = (torch.compile(f) if compiled else f for f in (fmt.encode, fmt.decode))
    assert torch.equal(encode(values.cuda()).cpu(), fmt.encode(values))
    assert torch.equal(decode(ALL.cuda()).cpu().view(torch.int32), fmt.decode(ALL).view(torch.int32))
