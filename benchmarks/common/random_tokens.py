"""A data component for benchmarks only: random tokens, for measuring the time of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from data.loading import Loading, Placement


def random_tokens(placement: Placement, requirements: dict[str, Any], *, samples: int, padded: bool = False) -> Loading:
    """Uniformly random text and image tokens in memory.

    Args:
        samples: samples per epoch, over all ranks.
        padded: whether captions have random lengths, from one token up to all positions.
    """
    draw = torch.Generator().manual_seed(placement.seed)
    text = torch.randint(requirements["text_vocabulary"], (samples, requirements["text_positions"]), generator=draw)
    if padded:
        lengths = torch.randint(1, requirements["text_positions"] + 1, (samples, 1), generator=draw)
        text[torch.arange(requirements["text_positions"]) >= lengths] = -1
    image = torch.randint(requirements["codes"], (samples, requirements["side"] ** 2), generator=draw)
    rows = [{"text": a, "image": b} for a, b in zip(text, image, strict=True)]
    sampler = DistributedSampler(rows, placement.world, placement.rank, shuffle=placement.training)
    loader = DataLoader(rows, placement.batch, sampler=sampler, drop_last=placement.training, pin_memory=placement.pin)
    return Loading(loader)
