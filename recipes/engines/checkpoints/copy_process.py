"""The process that copies checkpoints to a bucket while its parent trains; see `recipes.engines.checkpoints.copies`."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.helper_process import serve
from recipes.engines.checkpoints.bucket import Bucket


def push(task: dict[str, Any]) -> None:
    """Arguments of `Bucket.push`, and `address`."""
    Bucket(task.pop("address")).push(Path(task.pop("path")), **task)


if __name__ == "__main__":
    serve(push)
