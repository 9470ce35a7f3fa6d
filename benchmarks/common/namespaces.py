"""Two machines on one: network namespaces joined by a cable (a veth pair), whose two ends are limited to a rate by tc.

Differences from real machines: latency is microseconds; after a pause, each end may send at once what it could have
sent in 0.8 ms; from 1 Gbit/s on, segments of up to 64 KiB pass undivided, so that an interface counts one header per
segment instead of the 45 headers of packets of 1,500 bytes; and both machines share one processor, which also does the
work of the network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The size of the burst that a limited end may send after a pause: in seconds at its rate, and its bounds in bytes. With
# larger bursts, small messages would take no time; bursts smaller than a segment make the kernel split segments, which
# takes time at high rates.
BURST_SECONDS, BURST_LEAST, BURST_MOST = 8e-4, 5_000, 96_000
PORT = 29401


class Unavailable(Exception):
    """Namespaces cannot be made on this system; the message says why."""


@dataclass(frozen=True)
class Machine:
    """One end of the cable.

    Attributes:
        namespace: name of its network namespace.
        interface: its network device there.
        address: address of that device.
    """

    namespace: str
    interface: str
    address: str

    def command(self, words: list[str]) -> list[str]:
        """The command line that runs a command in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *words]


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two namespaces and the cable between them; they are removed at the end, also after an error.

    Raises:
        Unavailable: a missing program, missing permission, or a kernel without support.
    """
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise Unavailable(f"there is no program `{missing[0]}` (Debian: iproute2)")
    names = [f"pc{os.getpid()}{end}" for end in "ab"]  # also the devices' names, which have at most 15 letters
    machines = [Machine(name, name, f"192.0.2.{number}") for number, name in enumerate(names, 1)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        first, second = names
        _run("ip", "link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for machine in machines:
            within = ("ip", "-n", machine.namespace)
            _run(*within, "addr", "add", f"{machine.address}/30", "dev", machine.interface)
            _run(*within, "link", "set", "lo", "up")
            _run(*within, "link", "set", machine.interface, "up")
        _run(*machines[0].command(limiting(machines[0].interface, 1000.0)))  # fails if the kernel does not support it
        yield machines
    finally:
        for name in names:  # also removes its devices
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"`{' '.join(words)}` says: {' '.join(done.stderr.split())}")


def limiting(interface: str, rate: float) -> list[str]:
    """The command that limits the sending rate of an interface of this namespace.

    Args:
        interface: its name.
        rate: in Mbit/s.
    """
    burst = min(max(round(BURST_SECONDS * 1e6 * rate / 8), BURST_LEAST), BURST_MOST)
    # A long queue makes the sender wait, as a cable does. A short one drops packets, which TCP resends after 0.2 s.
    limit = ["rate", f"{round(1000 * rate)}kbit", "burst", f"{burst}b", "limit", "16mb"]
    return ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limit]


def sent_bytes(interface: str) -> int:
    """Bytes that an interface of this namespace has sent since it exists."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text(encoding="utf-8"))


def exchange(rank: int, addresses: list[str], count: int) -> float:
    """Both machines send bytes to each other by TCP at the same time, as in averaging. Returns received Mbit/s.

    Args:
        rank: number of this machine, 0 or 1.
        addresses: addresses of both machines.
        count: number of bytes.

    Raises:
        ConnectionError: the other machine does not answer, or closes the connection too early.
    """
    with contextlib.ExitStack() as stack:
        if rank == 0:
            listener = stack.enter_context(socket.create_server((addresses[0], PORT)))
            listener.settimeout(60)
            connection = stack.enter_context(listener.accept()[0])
        else:
            connection = stack.enter_context(_connected(addresses[0]))
        sender = threading.Thread(target=connection.sendall, args=(bytes(count),))
        buffer = bytearray(1 << 20)
        began, got = time.perf_counter(), 0
        sender.start()
        while got < count:
            arrived = connection.recv_into(buffer)
            if not arrived:
                raise ConnectionError(f"the other machine closed the connection after {got:,} of {count:,} bytes")
            got += arrived
        seconds = time.perf_counter() - began
        sender.join()
    return 8e-6 * count / seconds


def _connected(address: str) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection((address, PORT), timeout=60)
        except ConnectionRefusedError:  # the other machine does not listen yet
            time.sleep(0.1)
    raise ConnectionError(f"{address}:{PORT}: nothing listens there after 10 s")
