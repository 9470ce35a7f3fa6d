"""Convert a checkpoint, so that its run can be continued with the other engine.

python recipes/convert_checkpoint.py runs/sd2_base/checkpoints/latest-rank0.pt --to lightning
python recipes/convert_checkpoint.py runs/sd2_base/checkpoints/latest --to composer

A sharded checkpoint can also be converted to a full checkpoint of the same engine, as some checkpoints of earlier
versions must be (docs/upgrading.md):

python recipes/convert_checkpoint.py runs/dalle_12b/checkpoints/ep0-ba5000 --to composer

The converted checkpoint is written into the same folder, and checkpoints.autoresume treats it as the newest.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads
from recipes.config.command_line import path_of, user_errors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=path_of, help="checkpoint of a run, or a link to one")
    parser.add_argument("--to", choices=["composer", "lightning"], required=True, help="engine that continues the run")
    options = parser.parse_args(arguments)
    with user_errors():
        # PyTorch takes seconds to import; --help does not wait for it.
        from recipes.engines.checkpoints.conversion import convert
        from recipes.training.run_lock import no_run_beside

        with no_run_beside(options.checkpoint):  # which takes the newest checkpoint for its own
            print(convert(options.checkpoint, options.to))


if __name__ == "__main__":
    set_default_threads()
    main()
