"""Run by a launcher in place of a script, which argv names with its arguments: runs it as one of the launcher's ranks.

The first rank is this new process. The others are forked by the server of tests/ranks.py, which spares the imports, and
are told what the launcher tells them.
"""

import os
import runpy
import sys
from pathlib import Path

from tests.ranks import LAUNCHERS_OWN, launch

if __name__ == "__main__":
    del sys.argv[0]
    if os.environ["RANK"] == "0":
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        told = {name: os.environ[name] for name in LAUNCHERS_OWN}
        done = launch(1, Path(sys.argv[0]), *sys.argv[1:], cwd=Path.cwd(), variables=told)
        print(done.stdout + done.stderr)
        sys.exit(done.returncode)
