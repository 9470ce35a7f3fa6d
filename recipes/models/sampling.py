"""What the pipelines of all model families share when they draw pictures."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]


def autocast(device: str, precision: Precision) -> AbstractContextManager:
    """The context in which a network is run at a precision."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device, dtype, enabled=precision != "fp32")


@dataclass
class SamplingProgress:
    """Lines on how many of so many pictures are done."""

    count: int
    began: float = field(default_factory=time.monotonic)

    def say(self, done: int) -> None:
        """Print how many are done, how fast, and how long the rest will take."""
        rate = done / (time.monotonic() - self.began)
        left = (self.count - done) / rate
        print(f"generate: {done}/{self.count} pictures, {rate:.1f}/s, {left:.0f} s left", file=sys.stderr)
