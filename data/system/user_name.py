"""A name for the user of this process."""

from __future__ import annotations

import getpass
import os


def set_user_name() -> None:
    """Set `LOGNAME` to the user's number where the user has no name, as in containers that run under any user id.

    torch.compile names its cache after the user, and would end with a KeyError.
    """
    try:
        getpass.getuser()
    except KeyError:
        os.environ["LOGNAME"] = str(os.getuid())
