"""Train a recipe.

    composer recipes/train.py yamls/sd2_base.yaml training.global_batch=256
    python recipes/train.py yamls/openmoji_diffusion.yaml --dry-run

--dry-run checks the recipe, prints its memory and communication and exits. --print-config prints the resolved config
and exits. --help lists the keys, and docs/recipes.md the components.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.garbage_collection import rare_searches
from data.system.log import log
from data.system.threads import set_default_threads
from data.system.user_name import set_user_name
from recipes.checking.finding import raise_errors
from recipes.checking.machine import cheap_checks, launcher
from recipes.checking.recipe import cheap_recipe_checks
from recipes.config.command_line import print_once, read_command_line, user_errors
from recipes.config.recipe import Recipe
from recipes.training.run_lock import only_run
from recipes.training.stop import catch_again, ends, stop_signals
from recipes.training.watchdog import watched


def main() -> None:
    command = read_command_line(sys.argv[1:], Recipe, __doc__)
    recipe = command.config

    # From here on imports take seconds. All errors in the config have been reported above.
    with user_errors():
        if command.dry_run:
            with rare_searches():
                from recipes.engines.dry_run_checks import check_on_meta
                from recipes.planning.dry_run import describe_run

                raise_errors(cheap_recipe_checks(recipe))
                check_on_meta(recipe)
                print_once(describe_run(recipe, command.missing))
            return
        for warning in raise_errors((launcher(), *cheap_checks(), *cheap_recipe_checks(recipe))):
            log.warning(str(warning))
        with stop_signals():
            with rare_searches():
                if any(logger.name == "wandb" for logger in recipe.loggers.values()):
                    # First, because pydantic looks for the sources of wandb's models in all modules that are loaded:
                    # 3 s of CPU time here, and 26 s after Composer.
                    importlib.import_module("wandb")
                trainer = importlib.import_module(f"recipes.engines.{recipe.training.engine}.trainer")
                from recipes.engines.checkpoints.copies import copies_end
                from recipes.training.ranks import says_that_another_ended
            catch_again()  # where the imports have set handlers of their own
            training = recipe.training
            with (
                only_run(recipe.output),
                copies_end(),
                watched(training.watchdog, recipe.output, training.watchdog_ends),
                says_that_another_ended(),
            ):
                trainer.train(recipe)


if __name__ == "__main__":
    set_default_threads()
    set_user_name()
    with ends():
        main()
