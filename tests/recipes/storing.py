"""Run by trial_stores.py: a program of this repository, which SIGKILL ends before one of its requests to a store.

argv: WORD NUMBER PROGRAM and its arguments. The request is the NUMBER-th that changes something and has WORD in its
address or at the beginning of its body; 0: none.
"""

import os
import runpy
import signal
import sys
from urllib.parse import unquote

import requests


def body_of(request):
    """The beginning of a request's body, where it is in memory."""
    return request.body[:2000].decode(errors="replace") if isinstance(request.body, bytes) else str(request.body)[:2000]


def main():
    word, number, program = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    send, found = requests.Session.send, []

    def counted(session, request, **arguments):
        if request.method in ("PUT", "POST") and (word in unquote(request.url) or word in body_of(request)):
            found.append(request.url)
            if len(found) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return send(session, request, **arguments)

    requests.Session.send = counted
    sys.argv = sys.argv[3:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
