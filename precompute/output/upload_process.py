"""The process that uploads finished shards while its parent encodes; see `precompute.output.upload.Uploads`."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.helper_process import serve
from precompute.output.upload import Copy

copy_of = cache(Copy)  # whose store asks for a token once


def upload(task: dict[str, Any]) -> None:
    """Arguments of `Copy` and of `Copy.add`."""
    copy_of(Path(task["set"]), task["address"]).add(Path(task["folder"]), task["place"], task["names"])


if __name__ == "__main__":
    serve(upload)
