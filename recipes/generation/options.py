"""Command-line options of the commands that draw images with an export."""

from __future__ import annotations

import argparse
from typing import Any

from recipes.config.command_line import fail, path_of
from recipes.generation.exports import families
from recipes.models.family import Family


def add_options(parser: argparse.ArgumentParser, batch: int) -> None:
    """The export, how its images are drawn, and the options of every family of models.

    Options of a family that are not given stay None: its pipeline has the defaults.

    Args:
        parser: of the command.
        batch: default of --batch.
    """
    parser.add_argument("checkpoint", type=path_of, help="export folder of a run, or the run's folder")
    parser.add_argument("--candidates", type=int, help="images drawn per caption, of which the best are kept")
    parser.add_argument(
        "--rerank", metavar="MODEL", help="contrastive model that ranks them: folder or MODEL/TAG of open_clip"
    )
    parser.add_argument("--guidance", type=float, help="weight of classifier-free guidance (default: see below)")
    parser.add_argument("--seed", type=seed, default=0, help="image i has the seed SEED + i (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=batch, help="images drawn at once (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="number format (default: %(default)s)"
    )
    parser.add_argument(
        "--weights", choices=["ema", "raw"], help="averaged, or of the last batch (default: averaged if there are any)"
    )
    added = set()
    for family in families().values():
        group = parser.add_argument_group(f"{family.title} models", f"--guidance is {family.guidance:g} by default")
        for flag, settings in family.options.items():
            if flag not in added:  # an option that two families have is listed once
                group.add_argument(flag, **settings)
                added.add(flag)


def seed(text: str) -> int:
    """The value of --seed. The process ends here where generators, which take 64 bits, have no such seed."""
    if abs(number := int(text)) >= 2**62:  # the number of an image is added
        fail([f"--seed: {text}; give a number below 2^62"])
    return number


def own_options(options: argparse.Namespace, family: Family) -> dict[str, Any]:
    """The given ones of a family's options and the guidance, as keywords; options of other families are an error."""
    for other in families().values():
        for flag in other.options:
            if flag not in family.options and getattr(options, _keyword(flag)) is not None:
                fail([f"{flag}: an option of {other.title} models; this export holds a {family.title} model"])
    given = {name: getattr(options, name) for name in (*map(_keyword, family.options), "guidance")}
    return {name: value for name, value in given.items() if value is not None}


def _keyword(flag: str) -> str:
    """The keyword of an option: --top-k becomes top_k."""
    return flag.removeprefix("--").replace("-", "_")


def candidates_of(options: argparse.Namespace, each: int = 1) -> int:
    """Number of images that are drawn per caption, of which `each` are kept."""
    count = each if options.candidates is None else options.candidates
    if each < 1:
        fail([f"--each: {each}; give 1 or more"])
    if count < each:
        fail([f"--candidates: {count}; give at least as many as are kept ({each} per caption)"])
    if count > each and options.rerank is None:
        fail(["--candidates: give the model that says which are best: --rerank FOLDER"])
    if count == each and options.rerank is not None:
        fail([f"--rerank: of {each} per caption all are kept; give --candidates, how many are drawn for each"])
    return count
