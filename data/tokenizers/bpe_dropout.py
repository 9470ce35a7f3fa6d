"""Which merges BPE dropout leaves out (Provilkov et al. 2020), with few random numbers.

Most draws say "keep". So the distance to the next "drop", which is geometric, is drawn instead of each answer.
"""

from __future__ import annotations

import math
import random

FAR = 1 << 62  # draws, more than any caption needs


class MergeDropout:
    """Independent random draws, each of which drops a merge with probability p.

    Args:
        p: probability of "drop".
        draws: the random generator; None if p is 0.
    """

    def __init__(self, p: float, draws: random.Random | None) -> None:
        assert p == 0 or draws is not None, "dropout needs a generator"
        self._log_keep = math.log1p(-p) if p < 1 else -math.inf
        self._draws = draws
        self._kept = math.inf if p == 0 else self._distance()

    def _distance(self) -> int:
        # P(distance >= k) = (1 - p)^k; for p below 1e-300 the quotient overflows.
        return int(min(math.log(1.0 - self._draws.random()) / self._log_keep, FAR))

    def passes(self, count: int) -> bool:
        """Whether the next `count` draws drop nothing. If so, they are used up; otherwise none is."""
        if count > self._kept:
            return False
        self._kept -= count
        return True

    def next(self) -> bool:
        """Makes one draw; true drops the merge."""
        if self._kept > 0:
            self._kept -= 1
            return False
        self._kept = self._distance()
        return True
