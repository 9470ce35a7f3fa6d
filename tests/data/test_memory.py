"""The memory of a container, not of its machine."""

import pytest

from data.memory import MEMORY, limit

DOCKER = "/docker/ab12"  # on the machine; in the container its folder is the root


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/\n", {"memory.max": "8589934592\n"}, 8 << 30),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 3000),
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "2000"}, 2000),
        (f"4:cpu,memory:{DOCKER}\n0::/\n", {"memory/memory.limit_in_bytes": "5000"}, 5000),
        ("4:memory:/a\n", {"memory/memory.limit_in_bytes": str(2**63), "memory/a/memory.limit_in_bytes": "70"}, 70),
        ("4:cpuset:/\n", {}, None),
        (None, {}, None),
    ],
)
def test_the_smallest_limit_counts(tmp_path, groups, files, found):
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    if groups is not None:
        (tmp_path / "of_process").write_text(groups)
    assert limit(tmp_path / "of_process", tmp_path / "groups") == found


def test_here():
    assert 1 << 28 < MEMORY < 1 << 50
