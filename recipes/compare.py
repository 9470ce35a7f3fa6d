"""Compare runs in one HTML page: losses and metrics, speed, configs, and the images that the runs drew.

    python recipes/compare.py runs/openmoji_diffusion runs/openmoji_unet --out report.html

The page needs no network and no other file. Metrics are read from the TensorBoard files of the runs, and images from
their grids. docs/comparison.md describes the page.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.files import write_text
from recipes.comparison.page import page
from recipes.comparison.runs import read_runs
from recipes.config.command_line import check_out, fail, path_of, user_errors


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=path_of, nargs="+", help="folders of runs, such as runs/openmoji_diffusion")
    parser.add_argument("--out", type=path_of, default=Path("report.html"), help="page to write (default: %(default)s)")
    parser.add_argument("--grids", type=int, default=12, help="grids shown of each run (default: %(default)s)")
    parser.add_argument("--side", type=int, default=192, help="largest side of an image in px (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("grids", "side"):
        if getattr(options, name) < 1:
            fail([f"--{name}: {getattr(options, name)}; give 1 or more"])
    check_out(options.out)
    with user_errors():
        write_text(options.out, page(read_runs(options.runs, options.grids, options.side)))
    print(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
