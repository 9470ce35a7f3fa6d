"""Say before a run what it takes: memory, time per step, hours and cost, for each way to divide it over GPUs.

    python recipes/plan.py yamls/sd2_base.yaml --gpu h200 --gpus 8 64 512 --price 3.5
    python recipes/plan.py yamls/sd2_base_512.yaml training.global_batch=1024 --gpu a100-40 --gpus 16 --between 25

Nothing is computed or downloaded: the model's operations are read off without memory for weights. docs/planning.md says
how, and how far the figures can be trusted.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import dataclasses

from recipes.config.command_line import fail, user_errors
from recipes.config.recipe import Recipe, load_config
from recipes.config.values import ConfigError


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("yaml", help="a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--gpu", required=True, help="kind of GPU, such as h200; a wrong one lists all")
    parser.add_argument("--gpus", type=int, nargs="+", required=True, help="numbers of GPUs")
    parser.add_argument("--machine", type=int, default=8, help="GPUs of each machine (8)")
    parser.add_argument("--between", type=float, help="GB/s that a machine sends to others, instead of the table's")
    parser.add_argument("--price", type=float, help="price of a GPU for an hour")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> None:
    options = read_arguments(arguments)
    try:
        recipe = load_config(options.yaml, options.overrides, Recipe, [])
    except ConfigError as error:
        fail(error.lines)
    with user_errors():
        from callbacks.peak_flops import peak_flops
        from recipes.planning.gpus import SHARES, device_named
        from recipes.planning.plan import Planner
        from recipes.planning.settings import Place

        device = device_named(options.gpu)
        if options.between is not None:
            device = dataclasses.replace(device, between=1e9 * options.between)
        # In fp32, products run as TF32 where a GPU has it.
        low = recipe.training.precision != "fp32"
        peak = next(p for f in (("bf16", "fp16") if low else ("tf32", "fp32")) if (p := peak_flops(device.name, f)))
        planner = Planner(recipe)
        places = [Place(device, peak, SHARES, world, options.machine) for world in options.gpus]
        print(planner.report(places, options.price))


if __name__ == "__main__":
    main(sys.argv[1:])
