"""Check this machine, and a recipe if one is given, and say how to fix each problem.

    python recipes/doctor.py
    python recipes/doctor.py yamls/openmoji_diffusion.yaml
    composer -n 8 recipes/doctor.py yamls/sd2_base.yaml     # also the clocks of the machines and the links between them
    python recipes/doctor.py --clear                        # removes the shared memory that killed processes have left

Exits with status 1 if a run could not start or could not end. A training run makes the quick checks at its start.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from recipes.checking.machine import machine_checks
from recipes.config.command_line import read_command_line, user_errors
from recipes.config.recipe import Recipe


def main(arguments: list[str]) -> int:
    if arguments in (["--help"], ["-h"]):
        print((__doc__ or "").strip())
        return 0
    clear = "--clear" in arguments
    arguments = [argument for argument in arguments if argument != "--clear"]
    command = read_command_line([*arguments, "--dry-run"], Recipe, __doc__) if arguments else None
    with user_errors():
        from recipes.checking.links import link_checks

        findings = [*machine_checks(clear)]
        if command is not None:
            from recipes.checking.recipe import recipe_checks
            from recipes.engines.dry_run_checks import check_on_meta

            findings += recipe_checks(command.config, command.missing, check_on_meta)
        findings = [*findings, *link_checks(findings)]  # which also tells what other machines have found
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(map(str, findings)))
    return int(any(finding.level == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
