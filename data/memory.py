"""How much memory this process may take: that of the machine, or less where it runs in a container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def limit(processes: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smallest limit in bytes of the control groups that a process is in, of version 1 or 2; None: there is none.

    Args:
        processes: names the groups of the process.
        groups: where the file system of groups is mounted.
    """
    found = []
    with suppress(OSError):
        for line in processes.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            root, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
            group = root / path.lstrip("/")
            # A group has the limits of all above it. In a container the path may be that of the machine, of which only
            # the last group is mounted, as the root.
            for folder in (group, *group.parents):
                if not folder.is_relative_to(root):
                    break
                with suppress(OSError, ValueError):  # "max": no limit
                    found.append(int((folder / name).read_text()))
    return min(found, default=None)


_MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MEMORY = min(_MACHINE, limit() or _MACHINE)  # bytes
