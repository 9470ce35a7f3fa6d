"""The process that copies one checkpoint to a bucket while its parent trains; see `recipes.engines.checkpoint_copies`.

It reads the arguments of `Bucket.push` as JSON from its standard input, with `address`, that of the bucket, and
`parent`, the number of the process that waits for it. An error of the store is one line of standard error and status 2.
"""

import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from recipes.engines.bucket import Bucket
from recipes.training.stop import end_with_parent


def main() -> None:
    task = json.load(sys.stdin)
    # Two processes must not write to one bucket: the next start of a run that was killed copies, too.
    end_with_parent(signal.SIGKILL)
    if os.getppid() != task.pop("parent"):
        sys.exit(1)
    os.nice(10)  # what the training does comes first
    bucket, path = Bucket(task.pop("address")), Path(task.pop("path"))
    try:
        bucket.push(path, **task)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
