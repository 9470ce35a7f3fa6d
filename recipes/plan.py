"""Estimate memory, time per step, hours and cost of a run, with DDP, FSDP and tensor parallelism.

    python recipes/plan.py yamls/sd2_base.yaml --gpu h200 --gpus 8 64 512 --price 3.5
    python recipes/plan.py yamls/sd2_base_512.yaml training.global_batch=1024 --gpu a100-40 --gpus 16 --between 25
    python recipes/plan.py --calibrate mine             # measures this machine; with torchrun also its all-reduces
    python recipes/plan.py yamls/sd2_base.yaml --gpu mine --gpus 1

A plan needs no GPU and downloads nothing: the model's operations are counted without memory for its weights.
docs/planning.md describes how, and how the plans compare with published rates.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import dataclasses
import math
from typing import Any

from data.system.errors import visible
from data.system.threads import set_default_threads
from recipes.config.command_line import fail, path_of, user_errors
from recipes.config.recipe import Recipe, load_config
from recipes.config.values import ConfigError

MOST_GPUS = 1_000_000


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("yaml", nargs="?", help="a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--gpu", help="kind of GPU, such as h200, or a name given to --calibrate; an unknown kind lists all"
    )
    parser.add_argument("--gpus", type=_number_or_override, nargs="+", help="numbers of GPUs to plan for")
    parser.add_argument("--machine", type=int, default=8, help="GPUs of each machine (8)")
    parser.add_argument("--between", type=float, help="GB/s between machines (default: of usual machines)")
    parser.add_argument("--price", type=float, help="price of one GPU for an hour")
    parser.add_argument("--calibrate", metavar="NAME", help="measure this machine, and store the rates under this name")
    parser.add_argument("--devices", type=path_of, default=ROOT / "runs" / "devices", help="folder of measured devices")
    options = parser.parse_intermixed_args(arguments)
    options.overrides += [override for override in options.gpus or () if isinstance(override, str)]
    options.gpus = [number for number in options.gpus or () if isinstance(number, int)]
    if options.calibrate is None and not (options.yaml and options.gpu and options.gpus):
        parser.error("give a recipe, --gpu and --gpus; or --calibrate NAME")
    if options.calibrate is not None and (options.yaml or options.gpu or options.gpus):
        parser.error("--calibrate NAME takes neither a recipe nor --gpu or --gpus")
    for name, number in [*(("gpus", number) for number in options.gpus), ("machine", options.machine)]:
        if not 1 <= number <= MOST_GPUS:
            fail([f"--{name}: {number}; give 1 to {MOST_GPUS}"])
    if options.between is not None and not options.between > 0:
        fail([f"--between: {options.between:g}; give a rate above 0"])
    if options.price is not None and not 0 <= options.price < math.inf:
        fail([f"--price: {options.price:g}; give 0 or more"])
    return options


def _number_or_override(text: str) -> int | str:
    """A number of GPUs, or an override of the recipe that follows them."""
    if "=" in text:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number") from None


def measure(options: argparse.Namespace) -> None:
    """Measure this machine. With several processes, each measures, and the first one writes."""
    from recipes.planning.hardware.calibration import calibrate, describe
    from recipes.planning.hardware.gpus import check_name, write_device

    check_name(options.calibrate)
    device, circumstances = calibrate()
    if not int(os.environ.get("RANK") or 0):
        path = write_device(options.calibrate, device, circumstances, options.devices)
        print(f"{describe(device)}\nwrote {path}: plan with --gpu {options.calibrate}")


def peak_of(device: Any, recipe: Recipe) -> float:
    """The FLOP/s of a device in the number format in which a recipe computes its products."""
    from recipes.planning.hardware.peak_flops import peak_flops

    # In fp32, products run as TF32 where a GPU has it, and with gradient scales those of blocks in fp16.
    scaled = any(lever.name == "resblock_grad_scaling" for lever in recipe.algorithms.values())
    formats = ("tf32", "fp32") if recipe.training.precision == "fp32" and not scaled else ("bf16", "fp16")
    rates = device.peaks or {name: peak_flops(device.name, name) for name in formats}
    return next(rates[name] for name in formats if rates.get(name))


def plan(options: argparse.Namespace, recipe: Recipe) -> str:
    """The text about all numbers of GPUs."""
    from recipes.engines.dry_run_checks import check_levers_on_meta, levers_on_gpus
    from recipes.planning.divided_run import Cluster
    from recipes.planning.hardware.gpus import device_named
    from recipes.planning.plan import Planner

    device = device_named(options.gpu, options.devices)
    if options.between is not None:
        device = dataclasses.replace(device, between=1e9 * options.between)
    peak = peak_of(device, recipe)
    clusters = [Cluster(device, peak, device.shares, world, options.machine) for world in options.gpus]
    for cluster in clusters:
        cluster.check_links()
    planner = Planner(recipe, levers_on_gpus)
    check_levers_on_meta(recipe, planner.length.epoch_steps)
    return planner.report(clusters, options.price)


def main(arguments: list[str]) -> None:
    options = read_arguments(arguments)
    if options.calibrate is not None:
        with user_errors():
            measure(options)
        return
    try:
        recipe = load_config(options.yaml, options.overrides, Recipe, [])
    except ConfigError as error:
        fail(error.lines)
    with user_errors():
        print(visible(plan(options, recipe)))


if __name__ == "__main__":
    set_default_threads()
    main(sys.argv[1:])
