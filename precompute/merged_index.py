"""Which input shards are in the index of a merged set, of which no list is made: it may have half a gigabyte."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path

END = b"]}\n"  # of an index, as `precompute.output.OutputSet.join` writes it
_FILE = re.compile(rb'"basename": "shards/((?:[^"\\/]|\\.)+)/')


def merged_shards(index: Path) -> dict[str, None]:
    """The ids of the input shards with samples, in the order of the index, as keys.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not whole.
    """
    found: dict[bytes, None] = {}
    with open(index, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[-len(END) :] != END:
            raise ValueError(f"{index}: not whole")
        for match in _FILE.finditer(content):
            found[match[1]] = None
    return {json.loads(b'"' + shard + b'"'): None for shard in found}
