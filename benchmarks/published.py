"""Rates that others have published, and what the planner says of them.

    python benchmarks/published.py

Fits the shares of `recipes/planning/hardware/gpus.py` on three rates of Stable Diffusion 2's table and on three
figures of Megatron-LM, and predicts the others and sizes of DALL-E.
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
from collections.abc import Iterable, Iterator

from benchmarks.common.published_scaling import REST, fitted_v100, megatron_rows
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.planning.costs import cost_of, plan_of
from recipes.planning.devices import Devices
from recipes.planning.divided_run import Cluster, Setting
from recipes.planning.hardware.gpus import DEVICES, SHARES, V100_SHARES, Shares
from recipes.planning.plan import Planner
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
    settings = planner.settings(Cluster(DEVICE, PEAK, shares, gpus, 8))
    wanted = ("SHARD_GRAD_OP", MICROBATCH, False)
    return next(s for s in settings if (s.division, s.microbatch, s.recompute) == wanted)


def table(title: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of a Markdown table: what, published, predicted, difference."""
    lines = [f"| {title} | published | predicted | difference |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def diffusion_rows(planners: list[Planner]) -> Iterator[tuple[str, ...]]:
    """Images per second of Stable Diffusion 2 on A100s."""
    for number, resolution in enumerate((256, 512)):
        for gpus, rates in RATES.items():
            predicted = BATCH / setting_of(planners[number], gpus, SHARES).time.total
            used = FITTED.get((gpus, number))
            off = f"{predicted / rates[number] - 1:+.1%}" + (f", fitted: {used}" if used else "")
            yield f"{gpus} A100s at {resolution}", f"{rates[number]:,}", f"{predicted:,.0f}", off


def dalle_rows() -> Iterator[tuple[str, ...]]:
    """DALL-E's messages and weights."""
    for name, width, saved in SAVED:
        recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [], Recipe, [])
        task = build_on_meta(recipe.model)
        cost = cost_of(recipe.algorithms["powersgd"], plan_of(recipe, task, Devices(1024, 128)))
        found = re.search(r"(\d+)% are saved", cost.sent_note)[1]
        what = f"d = {width}: traffic of the blocks' matrices that PowerSGD saves"
        yield what, f"{saved}%", f"{found}%", f"{int(found) - saved:+d} points"
        if name == "dalle_12b":
            size = 2 * sum(p.numel() for p in task.parameters()) / 1e9
            yield f"d = {width}: GB of weights in 16 bits", "about 24", f"{size:.1f}", f"{size / 24 - 1:+.1%}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    planners = [Planner(load_config(ROOT / yaml, [], Recipe, [])) for yaml in YAMLS]
    v100, rest = fitted_v100(SHARES)
    for gpu, found, used in (("A100", fitted(planners), SHARES), ("V100", v100, V100_SHARES)):
        for name, shares in (("fitted", found), ("used", used)):
            print(
                f"{gpu}, {name}: compute {shares.compute:.3f}, gap {1e6 * shares.gap:.1f} us, links {shares.links:.3f}"
            )
    print(f"Megatron-LM's rest of a step: fitted {rest:.3f} s, used {REST:.3f} s")
    print()
    print(table("Stable Diffusion 2, images/s", diffusion_rows(planners)), end="\n\n")
    print(table("Megatron-LM on V100s", megatron_rows(V100_SHARES)), end="\n\n")
    print(table("DALL-E", dalle_rows()))


if __name__ == "__main__":
    main()
