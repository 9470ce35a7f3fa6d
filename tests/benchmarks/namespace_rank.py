"""Run on two ranks by test_network.py: benchmarks/network_rank.py, each rank in a network namespace.

argv: the settings; the address of the first machine; the namespaces, which are also the names of their interfaces. A
namespace is entered as `ip netns exec` enters it, by a process that has imported everything already.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
# Of <sched.h> and <sys/mount.h>.
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x20000
MS_REC, MS_SLAVE, MNT_DETACH = 1 << 14, 1 << 19, 2


def call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as file:
        call("setns", file.fileno(), CLONE_NEWNET)
    # /sys shows the interfaces of the namespace in which it was mounted.
    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None)
    call("umount2", b"/sys", MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)


if __name__ == "__main__":
    settings, address, *namespaces = sys.argv[1:]
    rank = int(os.environ["RANK"])
    enter(namespaces[rank])
    machine = {"NODE_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": address}
    machine |= {"GLOO_SOCKET_IFNAME": namespaces[rank], "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ.update({name: str(value) for name, value in machine.items()})
    sys.argv = ["benchmarks/network_rank.py", settings]
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "network_rank.py"), run_name="__main__")
