"""Train a recipe.

    composer recipes/train.py yamls/sd2_base.yaml training.global_batch=256
    python recipes/train.py yamls/openmoji_diffusion.yaml --dry-run

--help lists the keys, docs/recipes.md the components.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from recipes.config.command_line import read_command_line, user_errors
from recipes.config.recipe import Recipe


def main() -> None:
    command = read_command_line(sys.argv[1:], Recipe, __doc__)

    # From here on imports take seconds; everything that the config can get wrong was said above.
    with user_errors():
        if command.dry_run:
            from recipes.planning.dry_run import describe_run

            if os.environ.get("RANK", "0") == "0":
                print(describe_run(command.config, command.missing))
            return
        from callbacks.interval import ended
        from recipes.engines.composer.trainer import build_trainer

        trainer = build_trainer(command.config)
        if ended(trainer.state):
            print(f"already trained to {command.config.training.duration}: {command.config.output}", flush=True)
        else:
            trainer.fit()
        trainer.close()


if __name__ == "__main__":
    main()
