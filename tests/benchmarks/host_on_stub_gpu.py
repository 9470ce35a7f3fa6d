"""Run by test_host.py in a process that takes the stub for a GPU: a row of host.py, whose rate is of one step."""

from benchmarks import host

host.WARM_UP, host.WINDOWS, host.STEPS = 2, 1, 1

if __name__ == "__main__":
    host.main()
