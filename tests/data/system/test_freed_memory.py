"""Memory that the C library keeps goes back to the system."""

import subprocess
import sys

import pytest

# Prints whether pieces of 4 MB took memory, and whether it has gone back after they were freed and a call was made.
SCRIPT = """
import ctypes, resource, sys
from pathlib import Path
from data.system import freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "give_back_from_now_on":
    freed_memory.give_back_from_now_on()
else:
    libc.free(libc.malloc(30 << 20))  # after which glibc takes smaller pieces from the heap
before = resident()
pieces = []
for _ in range(50):
    piece = libc.malloc(4 << 20)
    ctypes.memset(piece, 1, 4 << 20)
    pieces.append((piece, libc.malloc(64)))
held = resident() - before
for piece, _ in pieces[:-1]:  # the small ones stay between them
    libc.free(piece)
if sys.argv[1] == "give_back":
    freed_memory.give_back()
print(held > 190, resident() - before < 40)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(("call", "given_back"), [("give_back", True), ("give_back_from_now_on", True), ("", False)])
def test_freed_memory_goes_back(call, given_back):
    found = subprocess.run([sys.executable, "-c", SCRIPT, call], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", str(given_back)]
