"""Rates that others have published, and what the planner says of them.

    python benchmarks/published.py

Fits the shares of `recipes/planning/gpus.py` on three rates of Stable Diffusion 2's table, and predicts the others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import dataclasses
import re

from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.planning.costs import cost_of
from recipes.planning.footprint import Devices
from recipes.planning.gpus import DEVICES, SHARES, Shares
from recipes.planning.plan import Planner
from recipes.planning.settings import Place, Setting, plan_of
from recipes.planning.step_time import pass_times

# Images per second on A100-40GB, latents precomputed, by the README of github.com/mosaicml/diffusion: GPUs -> (at 256,
# at 512). Its recipes have SHARD_GRAD_OP, a global batch of 2,048 and microbatches of 16.
RATES = {8: (1100, 290), 16: (2180, 585), 32: (4080, 1195), 64: (8530, 2340), 128: (11600, 4590)}
YAMLS = ("yamls/sd2_base.yaml", "yamls/sd2_base_512.yaml")
BATCH, MICROBATCH, PEAK = 2048, 16, 312e12
DEVICE = DEVICES["a100-40"]
# Ramesh et al. 2021, table 1: recipe, width, per cent of the traffic that is saved on machines of 8 GPUs.
SAVED = (("dalle_2b", 1920, 83), ("dalle_5b", 2688, 85), ("dalle_12b", 3968, 86))
FITTED = {(8, 0): "compute, gap", (8, 1): "compute, gap", (128, 0): "links"}


def fitted(planners: list[Planner]) -> Shares:
    """The shares that reproduce the three rates of `FITTED`, with the memory's as it is assumed."""
    one = dataclasses.replace(SHARES, compute=1.0, gap=1.0)
    passes = []
    for planner, rate in zip(planners, RATES[8], strict=True):
        compute = gap = traffic = 0.0
        # Which operations arithmetic bounds depends on the share: start from the one at hand, then fit it.
        compute, traffic, _ = pass_times(planner.traces.at(MICROBATCH), DEVICE, PEAK, SHARES, False)
        *_, gap = pass_times(planner.traces.at(MICROBATCH), DEVICE, PEAK, one, False)
        passes.append((compute * SHARES.compute, gap, 8 * MICROBATCH / rate - traffic))
    # compute / share + gap * seconds = time, for both resolutions.
    (c1, g1, t1), (c2, g2, t2) = passes
    determinant = c1 * g2 - c2 * g1
    inverse, seconds = (t1 * g2 - t2 * g1) / determinant, (c1 * t2 - c2 * t1) / determinant
    shares = dataclasses.replace(SHARES, compute=1 / inverse, gap=seconds)
    messages = setting_of(planners[0], 128, dataclasses.replace(shares, links=1.0)).time.messages
    return dataclasses.replace(shares, links=messages / (BATCH / RATES[128][0]))


def setting_of(planner: Planner, gpus: int, shares: Shares) -> Setting:
    """The published setting on a number of GPUs."""
    settings = planner.settings(Place(DEVICE, PEAK, shares, gpus, 8))
    wanted = ("SHARD_GRAD_OP", MICROBATCH, False)
    return next(s for s in settings if (s.division, s.microbatch, s.recompute) == wanted)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    planners = [Planner(load_config(ROOT / yaml, [], Recipe, [])) for yaml in YAMLS]
    shares = fitted(planners)
    print(f"fitted: compute {shares.compute:.3f}, gap {1e6 * shares.gap:.1f} us, links {shares.links:.3f}")
    print(f"used:   compute {SHARES.compute:.3f}, gap {1e6 * SHARES.gap:.1f} us, links {SHARES.links:.3f}\n")
    print("| A100s | resolution | published | predicted | difference | |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number, resolution in enumerate((256, 512)):
        for gpus, rates in RATES.items():
            predicted = BATCH / setting_of(planners[number], gpus, SHARES).time.total
            used = FITTED.get((gpus, number))
            note = f"fitted: {used}" if used else "predicted"
            off = predicted / rates[number] - 1
            print(f"| {gpus} | {resolution} | {rates[number]:,} | {predicted:,.0f} | {off:+.1%} | {note} |")
    print("\n| DALL-E | what | published | predicted |\n| --- | --- | --- | --- |")
    for name, width, saved in SAVED:
        recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [], Recipe, [])
        task = build_on_meta(recipe.model)
        cost = cost_of(recipe.algorithms["powersgd"], plan_of(task, Devices(1024, 128), recipe.output))
        found = re.search(r"(\d+)% are saved", cost.sent_note)[1]
        print(f"| d = {width} | traffic of the blocks' matrices that PowerSGD saves | {saved}% | {found}% |")
        if name == "dalle_12b":
            size = 2 * sum(p.numel() for p in task.parameters()) / 1e9
            print(f"| d = {width} | GB of weights in 16 bits | about 24 | {size:.1f} |")


if __name__ == "__main__":
    main()
