"""Run by test_host.py in a process that takes the stub for a GPU: a row of host.py, whose rate is of one step."""

import sys

from benchmarks import host

host.WARM_UP, host.WINDOWS, host.STEPS = 1, 1, 1
# Under Lightning memory is not looked at, and planning takes five seconds. Of blocks, which are alike, half are enough.
if "Lightning" in (name := sys.argv[-1]):
    host.planned = lambda recipe, of_many: 0.0
    subject, changes = host.SETTINGS[name]
    host.SETTINGS[name] = subject, [*changes, "model.denoiser.blocks=1"]

if __name__ == "__main__":
    host.main()
