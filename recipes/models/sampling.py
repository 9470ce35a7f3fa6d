"""What the pipelines of all model families share when they generate images."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from data.system.errors import WrongResult

Precision = Literal["fp32", "bf16", "fp16"]
LARGEST_GUIDANCE = 1e30  # products of far larger weights are infinite in 32 bits, and their differences NaN
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: str, precision: Precision) -> AbstractContextManager:
    """The autocast context for a precision; fp32 is without autocast."""
    return torch.autocast(device, DTYPES[precision], enabled=precision != "fp32")


def check_guidance(guidance: float) -> None:
    """
    Raises:
        ValueError: the weight of classifier-free guidance is NaN or too large.
    """
    if not abs(guidance) <= LARGEST_GUIDANCE:
        raise ValueError(f"guidance: {guidance}; give a number of at most {LARGEST_GUIDANCE:g} (1 for none)")


def check_finite(finite: torch.Tensor, precision: Precision) -> None:
    """
    Args:
        finite: (B,) bool, per image: whether all numbers that it was computed from are finite.

    Raises:
        ValueError: some are not, such as those of a network that overflows. The image would be black, or any other.
    """
    lost = int((~finite).sum())
    if lost:
        raise ValueError(
            f"{lost} of {len(finite)} images are not finite in {precision}; use precision fp32, a guidance nearer to "
            "1, or other weights"
        )


def check_images(images: object, count: int) -> np.ndarray:
    """What a pipeline's `generate` returned for `count` captions.

    Raises:
        WrongResult: it is no array (count, H, W, 3) uint8. Figures of fewer images, or of images in another range,
            would be wrong without a word.
    """
    array = isinstance(images, np.ndarray)
    if array and images.dtype == np.uint8 and images.ndim == 4 and (len(images), images.shape[3]) == (count, 3):
        return images
    found = f"an array {images.dtype} {images.shape}" if array else f"an instance of {type(images).__name__}"
    raise WrongResult(
        f"generate() of the pipeline returns {found} for {count} captions; return an array uint8 ({count}, height, "
        "width, 3), see recipes/models/family.py"
    )


@dataclass
class SamplingProgress:
    """Lines of progress on standard error: how many of `count` images are done."""

    count: int
    began: float = field(default_factory=time.monotonic)

    def say(self, done: int) -> None:
        """Print how many images are done, the rate, and the time that is left."""
        rate = done / (time.monotonic() - self.began)
        left = (self.count - done) / rate
        print(f"generate: {done}/{self.count} images, {rate:.1f}/s, {left:.0f} s left", file=sys.stderr)
