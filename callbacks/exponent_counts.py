"""Histograms of the exponents of gradients, and which shares of them 16-bit formats represent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.algorithms.sixteen_bit.formats import MEAN_1_6_9

LEAST, MOST = -149, 127  # exponents of 32-bit floats, subnormals included
COLUMNS = MOST - LEAST + 3  # of a histogram: zeros, one per exponent, values that are not finite
ZERO, NONFINITE = 0, COLUMNS - 1
# Exponents that a format represents: from that of its smallest subnormal number to below the second.
FP16_RANGE = (-24, 16)
NARROW_RANGE = (round(math.log2(MEAN_1_6_9.least)), math.ceil(math.log2(MEAN_1_6_9.largest)))


@dataclass
class Histograms:
    """One histogram of gradient exponents per block of a model.

    Attributes:
        names: names of the blocks.
        counts: (blocks, COLUMNS) int64 on the CPU; see `count_exponents`.
        log2_scales: binary logarithm of the scale that each block's gradients are multiplied by in fp16.
    """

    names: list[str]
    counts: Tensor
    log2_scales: list[float]

    def between(self, block: int, low: float, high: float) -> int:
        """The number of gradients of a block whose exponent e satisfies low <= e < high."""
        columns = [e - LEAST + 1 for e in range(LEAST, MOST + 1) if low <= e < high]
        return int(self.counts[block, columns].sum())

    def shares(self) -> dict[str, float]:
        """Shares of all gradients.

        Returns:
            `zero` and `nonfinite`; `below_fp16` and `above_fp16`: after multiplication with the block's scale, smaller
            than fp16's smallest subnormal number, or too large for fp16; `outside_1_6_9`: without a scale, too small or
            too large for 1-6-9. Exponents count as a whole: one that is partly inside a range counts as inside.
        """
        low, end = FP16_RANGE
        below = above = narrow = 0
        for block, log2_scale in enumerate(self.log2_scales):
            below += self.between(block, -math.inf, math.floor(low - log2_scale))
            above += self.between(block, math.ceil(end - log2_scale), math.inf)
            narrow += self.between(block, -math.inf, NARROW_RANGE[0]) + self.between(block, NARROW_RANGE[1], math.inf)
        zero, nonfinite = (int(self.counts[:, column].sum()) for column in (ZERO, NONFINITE))
        found = {"zero": zero, "nonfinite": nonfinite, "below_fp16": below, "above_fp16": above}
        found["outside_1_6_9"] = narrow
        return {name: count / max(1, int(self.counts.sum())) for name, count in found.items()}

    def record(self) -> dict[str, Any]:
        """The shares and each block's histogram, as JSON values."""
        blocks = []
        for name, row, log2_scale in zip(self.names, self.counts.tolist(), self.log2_scales, strict=True):
            exponents = {str(column + LEAST - 1): row[column] for column in range(1, NONFINITE) if row[column]}
            entry = {"block": name, "log2_scale": round(log2_scale, 4), "elements": sum(row), "zeros": row[ZERO]}
            blocks.append({**entry, "nonfinite": row[NONFINITE], "exponents": exponents})
        return {"shares": self.shares(), "blocks": blocks}


def count_exponents(values: Tensor) -> Tensor:
    """A histogram of floor(log2 |x|).

    Args:
        values: (...) of any floating-point type.

    Returns:
        (COLUMNS,) int64: zeros, then those of the exponents -149 to 127, then infinities and NaN.
    """
    values = values.flatten().float()
    columns = torch.frexp(values).exponent - LEAST  # frexp's significand lies in [1/2, 1)
    columns = torch.where(torch.isfinite(values), columns, NONFINITE).masked_fill_(values == 0, ZERO)
    return torch.bincount(columns, minlength=COLUMNS)
