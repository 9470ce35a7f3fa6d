"""The start of a run, at which its processes meet. Some may never come: their machine has failed, or the variables that
tell of them are those of an earlier job."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from data.system.errors import Outage, visible
from data.system.log import say

PATIENCE = 60.0  # seconds of waiting after which it is said what is waited for
LIMIT = 600.0  # seconds for which a process waits for the others


@contextmanager
def meeting() -> Iterator[None]:
    """A context in which this process joins the process group that the launcher's variables describe.

    Raises:
        Outage: not all processes came, or they cannot reach each other.
    """
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1:
        yield
        return
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
    who = f"rank {os.environ.get('RANK')}"
    text = f"{who}: waits up to {LIMIT:.0f} s for all {world} processes of the run (WORLD_SIZE) to meet at {place}"
    timer = threading.Timer(PATIENCE, say, [visible(f"{text}; if another job has left these variables, unset them")])
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors
        reason = (str(error).splitlines() or [""])[0]
        raise Outage(
            f"launcher: {who} did not meet all {world} processes of the run at {place}: {reason}. See whether the "
            "others were started and what they say; if another job has left these variables, unset them"
        ) from error
    finally:
        timer.cancel()
