"""Run by test_bucket_killed.py: recipes/train.py in a process whose number is in a file.

argv: FILE, and the arguments of recipes/train.py.
"""

import os
import sys
from pathlib import Path

from recipes.train import main

if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text(str(os.getpid()))
    main()
