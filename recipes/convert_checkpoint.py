"""Go on with a run under the other engine: convert its checkpoint.

python recipes/convert_checkpoint.py runs/sd2_base/checkpoints/latest-rank0.pt --to lightning
python recipes/convert_checkpoint.py runs/sd2_base/checkpoints/latest --to composer

A sharded checkpoint is also made a full one of the same engine, for instance because an earlier version wrote it:

python recipes/convert_checkpoint.py runs/dalle_12b/checkpoints/ep0-ba5000 --to composer

The converted checkpoint lies beside the other one, and is the newest for checkpoints.autoresume.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.threads import set_default_threads
from recipes.config.command_line import path_of, user_errors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=path_of, help="checkpoint of a run, or a link to one")
    parser.add_argument("--to", choices=["composer", "lightning"], required=True, help="engine that is to go on")
    options = parser.parse_args(arguments)
    with user_errors():
        # PyTorch takes seconds to import; --help does not wait for it.
        from recipes.engines.conversion import convert

        print(convert(options.checkpoint, options.to))


if __name__ == "__main__":
    set_default_threads()
    main()
