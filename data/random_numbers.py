"""Random numbers for the samples of a training batch: of the device's generator, or of each sample by itself.

The generator of a device belongs to a rank, so its numbers depend on how samples are divided over ranks. The numbers of
`SampleDraws` depend on the sample alone. They are a function of a seed and a counter (SplitMix64 of Steele, Lea and
Flood 2014), which is computed for the whole batch at once, on its device, without a state and without waiting for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from data.loading import Batch

ENTRY = "draws"  # of a batch: (B,) int64, what the numbers of each sample depend on
# Who draws first takes this many kinds of numbers at most; see `draws_of`.
KINDS = 16


class Draws:
    """Numbers of the global generator of a device. Each method takes a tensor whose first dimension is the sample."""

    def normal_like(self, x: Tensor) -> Tensor:
        """Standard normal, of the shape, dtype and device of x (B, ...)."""
        return torch.randn_like(x)

    def normal(self, x: Tensor) -> Tensor:
        """Standard normal, (B,) float32."""
        return torch.randn(len(x), device=x.device)

    def uniform(self, x: Tensor) -> Tensor:
        """Uniform in [0, 1), (B,) float32."""
        return torch.rand(len(x), device=x.device)

    def integers(self, x: Tensor, below: int) -> Tensor:
        """Uniform in [0, below), (B,) int64."""
        return torch.randint(below, (len(x),), device=x.device)


class SampleDraws(Draws):
    """Numbers that belong to samples.

    Args:
        seeds: (B,) int64.
        kind: number of the first kind of number that is drawn; each call takes the next.
    """

    def __init__(self, seeds: Tensor, kind: int = 0) -> None:
        self._seeds = seeds
        self._kind = kind

    def _words(self, count: int) -> Tensor:
        """(B, count) int64, uniform over all values."""
        seeds = mix(self._seeds + _signed(self._kind * STEP))
        self._kind += 1
        return mix(seeds[:, None] + STEP * torch.arange(1, count + 1, device=seeds.device))

    def _normals(self, count: int) -> Tensor:
        """(B, count) float32, standard normal, by Box and Muller's transform of the halves of each word."""
        words = self._words(-(-count // 2))
        radius = (((words >> 32) & HALF).float() + 1).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = (words & HALF).float().mul_(2 * math.pi * 2.0**-32)
        return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]

    def normal_like(self, x: Tensor) -> Tensor:
        """See `Draws`."""
        return self._normals(x[0].numel()).view(x.shape).to(x.dtype)

    def normal(self, x: Tensor) -> Tensor:
        """See `Draws`."""
        return self._normals(1)[:, 0]

    def uniform(self, x: Tensor) -> Tensor:
        """See `Draws`."""
        return _shifted(self._words(1)[:, 0], 40).float() * 2.0**-24

    def integers(self, x: Tensor, below: int) -> Tensor:
        """See `Draws`."""
        return _shifted(self._words(1)[:, 0], 1) % below


def draws_of(batch: Batch, place: int) -> Draws:
    """How random numbers for a batch are drawn.

    Args:
        batch: with the entry `draws` if its samples have numbers of their own.
        place: of the caller among all that draw for a batch: 0 the data, 1 the model. They draw different numbers.
    """
    return SampleDraws(batch[ENTRY], place * KINDS) if ENTRY in batch else Draws()


def seeds_of(samples: Tensor, seed: int, batch: int) -> Tensor:
    """What the numbers of samples depend on in one batch of a run.

    Args:
        samples: (B,) int64, a number of each sample, such as `data.encoded.dataset.key_seed` of its key.
        seed: of the run.
        batch: number of the batch in the run, because a sample gets other numbers in each epoch.

    Returns:
        (B,) int64, for the batch's entry `draws`.
    """
    run = mix(torch.tensor([seed, batch]) + STEP)
    return mix(mix(samples ^ run[0]) + run[1])


# --- SplitMix64: arithmetic of 64 bits, in which products and sums wrap around -------------------------------------


def _signed(value: int) -> int:
    """An integer as int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


STEP = _signed(0x9E3779B97F4A7C15)
FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
HALF = (1 << 32) - 1


def mix(words: Tensor) -> Tensor:
    """A bijection of int64 in which each bit of the result depends on all bits of the word."""
    words = (words ^ _shifted(words, 30)) * FACTORS[0]
    words = (words ^ _shifted(words, 27)) * FACTORS[1]
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted to the right, with zeros at the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
