"""Run by test_host.py in a process that takes the stub for a GPU: a row of host.py, whose rate is of one step."""

import sys

from benchmarks import host

host.WARM_UP, host.WINDOWS, host.STEPS = 2, 1, 1
if "Lightning" in sys.argv[-1]:  # its memory is not looked at, and planning takes five seconds
    host.planned = lambda recipe, of_many: 0.0

if __name__ == "__main__":
    host.main()
