"""Convert a checkpoint, or an export of a run, to a folder that other programs can open, such as diffusers.

python recipes/export.py runs/openmoji_diffusion/checkpoints/latest-rank0.pt exports/openmoji
python recipes/export.py runs/openmoji_dalle exports/openmoji_dalle --weights raw
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads
from recipes.config.command_line import path_of, user_errors


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=path_of, help="checkpoint of either engine, a run's folder, or its export")
    parser.add_argument("out", type=path_of, help="folder to write; an earlier export in it is replaced")
    parser.add_argument(
        "--weights", choices=["ema", "raw"], help="averaged, or of the last batch (default: averaged if there are any)"
    )
    parser.add_argument(
        "--layout", choices=["diffusers", "native"], help="of the folder (default: diffusers, if it has such a model)"
    )
    parser.add_argument("--recipe", type=path_of, help="config of the checkpoint's run (default: its config.yaml)")
    parser.add_argument(
        "--data",
        type=path_of,
        metavar="FOLDER",
        help="folder with the manifest of the run's data: the encoded set, or an export (default: as the recipe says)",
    )
    options = parser.parse_args(arguments)
    with user_errors():
        if not options.checkpoint.exists():
            raise FileNotFoundError(f"{options.checkpoint}: no such checkpoint, run or export")
        # PyTorch and diffusers take seconds to import; --help and a wrong path do not wait for them.
        from recipes.exporting.write import write_export

        layout = write_export(
            options.checkpoint,
            options.out,
            weights=options.weights,
            layout=options.layout,
            recipe_file=options.recipe,
            data=options.data,
        )
    print(f"{options.out} ({layout})")


if __name__ == "__main__":
    set_default_threads()
    main(sys.argv[1:])
