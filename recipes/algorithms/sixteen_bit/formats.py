"""16-bit floating-point formats with six exponent bits (Ramesh et al. 2021, B.2 and E.2), stored as int16.

| format | bits (sign-exponent-significand) | bias | least subnormal | least normal | largest | used for |
| --- | --- | --- | --- | --- | --- | --- |
| `MEAN_1_6_9` | 1-6-9 | 60 | 2^-68 | 2^-59 | 16 - 2^-6 = 15.984375 | Adam's mean, PowerSGD's error, P and Q |
| `VARIANCE_0_6_10` | 0-6-10 | 61 | 2^-70 | 2^-60 | 8 - 2^-8 = 7.99609375 | Adam's variance |

No code is reserved: there is neither infinity nor NaN, and all 65,536 codes are numbers. The biases follow from the
largest value that must be representable: for 1-6-9 the published one, slightly below 16; for 0-6-10 the smallest power
of two above 5, where the variance is clipped. The square root of its least subnormal is 2^-35, far below Adam's eps of
1e-8.

Values are rounded to the nearest code, ties to the even one. Values outside the range of a format, and infinities,
become its largest value with their sign; in a format without sign, negative values become 0. NaN becomes zero, so that
callers who must detect NaN check before encoding.

All arithmetic consists of integer operations and one addition of 32-bit floats, rounded as IEEE 754 says. Results are
therefore equal bit by bit on CPUs and GPUs, compiled or not. A value that is subnormal in 32-bit becomes 0 in every
format.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

INFINITY = 0x7F800000  # of a 32-bit float; larger magnitudes are NaNs
FLOAT_BIAS, FLOAT_SIGNIFICAND = 127, 23


@dataclass(frozen=True)
class Format16:
    """A 16-bit floating-point format without infinities and NaN.

    Attributes:
        name: numbers of sign, exponent and significand bits.
        signed: whether the first bit is a sign.
        significand: bits of the significand, without the implicit leading one.
        bias: bias of the exponent: normal numbers have exponents from 1 - bias to 2^e - 1 - bias, for e exponent bits.
    """

    name: str
    signed: bool
    significand: int
    bias: int

    dtype = torch.int16  # of the codes
    bits = 16

    def __post_init__(self) -> None:
        # The arithmetic below needs every value, and the constant that rounds subnormals, as a normal 32-bit float.
        assert 1 - self.bias - self.significand > 1 - FLOAT_BIAS
        assert (self.largest_code >> self.significand) - self.bias <= FLOAT_BIAS

    @property
    def largest_code(self) -> int:
        """The code of the largest value."""
        return 0x7FFF if self.signed else 0xFFFF

    @property
    def largest(self) -> float:
        """The largest value."""
        return (2.0 - 2.0**-self.significand) * 2.0 ** ((self.largest_code >> self.significand) - self.bias)

    @property
    def least(self) -> float:
        """The smallest value above zero, which is the spacing of subnormals."""
        return 2.0 ** (1 - self.bias - self.significand)

    @property
    def constants(self) -> tuple[bool, int, int, float]:
        """The arguments of the kernels: signed, significand, bias and least."""
        return self.signed, self.significand, self.bias, self.least

    def encode(self, values: Tensor) -> Tensor:
        """Codes of the nearest values.

        Args:
            values: (...) float32; of another dtype, they are rounded to it first.

        Returns:
            (...) int16. Without a sign bit, codes use all 16 bits, so that the upper half of them is negative as int16.
        """
        values = values.to(torch.float32)
        if values.is_cuda:
            return kernels().encode(values, self.constants)
        shift = FLOAT_SIGNIFICAND - self.significand
        offset = (FLOAT_BIAS - self.bias) << FLOAT_SIGNIFICAND  # a normal number's float: (code << shift) + offset
        bits = values.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        nothing = magnitude > INFINITY if self.signed else (magnitude > INFINITY) | (bits < 0)
        magnitude = torch.where(nothing, 0, magnitude.clamp(max=(self.largest_code << shift) + offset))
        # Normal: add half of the last place, or one less if the kept part is even, and truncate.
        half = (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)
        normal = (magnitude - offset + half) >> shift
        # Subnormal: add a float whose last place is `least`, so that the addition rounds as needed. The sum's last 16
        # bits are the code; its exponent lies above them.
        ruler = self.least * 2.0**FLOAT_SIGNIFICAND
        subnormal = (magnitude.view(torch.float32) + ruler).view(torch.int32)
        codes = torch.where(magnitude < (1 << FLOAT_SIGNIFICAND) + offset, subnormal, normal)
        if self.signed:
            codes = codes | ((bits >> 16) & 0x8000)
        return codes.to(torch.int16)

    def decode(self, codes: Tensor) -> Tensor:
        """The values of codes, exactly.

        Args:
            codes: (...) int16.

        Returns:
            (...) float32.
        """
        if codes.is_cuda:
            return kernels().decode(codes, self.constants)
        shift = FLOAT_SIGNIFICAND - self.significand
        magnitude = codes.to(torch.int32) & self.largest_code
        normal = (magnitude << shift) + ((FLOAT_BIAS - self.bias) << FLOAT_SIGNIFICAND)
        subnormal = magnitude.to(torch.float32) * self.least
        values = torch.where(magnitude < 1 << self.significand, subnormal, normal.view(torch.float32))
        if self.signed:
            bits = values.view(torch.int32)
            bits |= codes.to(torch.int32) & -0x80000000  # the sign of the code, which the conversion to int32 extended
        return values


def kernels() -> ModuleType:
    """The Triton kernels, imported when a GPU is first used."""
    from recipes.algorithms.sixteen_bit import formats_kernel

    return formats_kernel


@dataclass(frozen=True)
class Float32:
    """32-bit floats with the methods of `Format16`: the codes are the values, and nothing is rounded.

    Values of 64 bits are left as they are, too.
    """

    name: str = "32-bit"

    dtype = torch.float32
    bits = 32
    largest = torch.finfo(torch.float32).max

    def encode(self, values: Tensor) -> Tensor:
        """The values themselves, including infinities and NaN."""
        return values

    def decode(self, codes: Tensor) -> Tensor:
        """The codes themselves."""
        return codes


Format = Format16 | Float32

MEAN_1_6_9 = Format16("1-6-9", signed=True, significand=9, bias=60)
VARIANCE_0_6_10 = Format16("0-6-10", signed=False, significand=10, bias=61)
FLOAT_32 = Float32()
