"""The stub GPU ends a process that touches page-locked memory while a copy is under way."""

import signal
from pathlib import Path

import pytest

from tests.stub_gpu import needs_stub_gpu

pytestmark = needs_stub_gpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("touches", "when", "completed"),
    [
        ("read", "at once", False),
        ("read", "after another stream", False),
        ("read", "after an event before it", False),
        ("read", "after the stream", True),
        ("read", "after a stream that waits for the stream", True),
        ("read", "after an event", True),
        ("write", "at once", False),
        ("write", "after the stream", True),
    ],
)
def test_copies_are_under_way_until_the_host_waits(stub_gpu, touches, when, completed):
    done = stub_gpu(Path(__file__).with_name("copies_on_stub_gpu.py"), touches, when)
    assert done.returncode == (0 if completed else -signal.SIGSEGV), done.stderr[-4000:]
    assert done.stdout == ("done\n" if completed else "")
    if not completed:
        assert "copies_on_stub_gpu.py" in done.stderr  # the line
