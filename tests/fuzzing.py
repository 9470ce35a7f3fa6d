"""Bytes and values that differ a little from good ones, for tests of what nobody should trust."""

import json
import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

few = settings(max_examples=40, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def reads_or_refuses(read, *arguments):
    """What `read` returns, or None where it raises one of the two errors that users get in one line."""
    try:
        return read(*arguments)
    except (ValueError, FileNotFoundError) as error:
        assert str(error) and "\n" not in str(error) and not isinstance(error, UnicodeError)  # which names no file
        return None


@st.composite
def changed_bytes(draw, data: bytes):
    """`data` with a few bytes replaced, and sometimes cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed)


def changed_json(tree):
    """A JSON tree with one value replaced or removed, at any depth."""

    @st.composite
    def change(draw):
        copy = json.loads(json.dumps(tree))
        place = copy
        while True:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            inner = place[key]
            if not (isinstance(inner, dict | list) and inner and draw(st.booleans())):
                break
            place = inner
        if draw(st.booleans()):
            place[key] = draw(values)
        else:
            del place[key]
        return copy

    return change()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def other_encoding(folder: Path, column: str, encoding: str) -> None:
    """Let the index of a set say that a column has another encoding."""
    index = json.loads((folder / "index.json").read_text())
    for entry in index["shards"]:
        entry["column_encodings"][entry["column_names"].index(column)] = encoding
    (folder / "index.json").write_text(json.dumps(index))
