"""The ways in which an evaluation draws its images. Nothing slow is imported here: a dry run counts them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from recipes.evaluation.config import Evaluation


@dataclass(frozen=True)
class Variant:
    """One way to draw all images.

    Attributes:
        name: such as guidance=3.
        options: of `generate` of the family's pipeline.
        pools: sizes of the pool from which the best image is taken; empty: there is one candidate.
        radii: of the blur.
    """

    name: str
    options: dict[str, Any]
    pools: tuple[int, ...] = ()
    radii: tuple[int, ...] = (0,)


def variants(config: Evaluation) -> list[Variant]:
    """What a config asks for: the sampling as it is, with all radii of blur; each value of a sweep; the pools.

    An option that is null is left to the pipeline's default.
    """

    def given(**changed: Any) -> dict[str, Any]:
        return {name: value for name, value in {**config.sampling, **changed}.items() if value is not None}

    found = [Variant("sampling", given(), radii=tuple(config.blur))]
    for option, values in config.sweeps.items():
        found += [Variant(f"{option}={value}", given(**{option: value})) for value in values]
    if config.rerank is not None:
        found.append(Variant("rerank", given(), pools=tuple(sorted(set(config.rerank.pools)))))
    return found


def distinct(found: list[Variant]) -> list[Variant]:
    """Those whose images no earlier one has: a value of a sweep may be that of the sampling, or there twice."""
    first: dict[str, Variant] = {}
    for variant in found:
        # By JSON, as the names of the files of finished work: to Python, 1 is equal to 1.0 and to True.
        first.setdefault(json.dumps([variant.options, variant.pools, variant.radii], sort_keys=True), variant)
    return list(first.values())
