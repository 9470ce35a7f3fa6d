"""Run by execnet in place of Python for each worker of pytest-xdist: has the server of tests/ranks.py fork the worker.

The forked process takes over standard input, output and error, over which execnet talks to it, and this one waits for
its end. argv: the address of the server, and then the words that execnet gives to Python.
"""

import os
import socket
import sys


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    server.connect("\0" + sys.argv[1])
    socket.send_fds(server, [os.getcwd().encode()], [0, 1, 2])
    for stream in (0, 1):  # so that the end of either process is seen at the other end
        os.close(stream)
    server.recv(1)


if __name__ == "__main__":
    main()
