"""Which input shards are in the index of a merged set, of which no list is made: it may have half a gigabyte."""

from __future__ import annotations

import json
import re
from pathlib import Path

END = b"]}\n"  # of an index, as `precompute.output.output_set.OutputSet.join` writes it
BLOCK = 1 << 24  # bytes that are read at once
LONGEST = 1 << 12  # bytes that the path of a file takes up at most; each of its letters may be written as six
_FILE = re.compile(rb'"basename": "shards/((?:[^"\\/]|\\.)+)/')


def merged_shards(index: Path) -> dict[str, None]:
    """The ids of the input shards with samples, in the order of the index, as keys.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not whole.
    """
    found: dict[bytes, None] = {}
    content = b""
    # Not mapped into memory: where another machine replaces the file meanwhile, or the disk fails, the system would end
    # this process by a signal, and some network file systems map no files.
    with open(index, "rb") as file:
        while block := file.read(BLOCK):
            content = content[-LONGEST:] + block
            for match in _FILE.finditer(content):
                found[match[1]] = None
    if not content.endswith(END):
        raise ValueError(f"{index}: not whole")
    return {json.loads(b'"' + shard + b'"'): None for shard in found}
