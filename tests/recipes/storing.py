"""Run by trial_stores.py: a program of this repository, which SIGKILL ends before one of its requests to a store, or of
those of its helper process.

argv: WORD NUMBER PROGRAM and its arguments. The request is the NUMBER-th of a process that changes something and has
WORD in its address or at the beginning of its body; 0: none.
"""

import os
import runpy
import signal
import subprocess
import sys
from types import SimpleNamespace
from urllib.parse import unquote

import requests

from data.system import helper_process

HELPS = "TESTS_STORING_HELPS"  # environment variable of helper processes


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
                os.kill(os.getppid() if HELPS in os.environ else os.getpid(), signal.SIGKILL)
                signal.pause()  # a helper ends with its parent
        return send(session, request, **arguments)

    def helper(command, **options):
        python, *words = command
        return subprocess.Popen([python, __file__, word, str(number), *words], env=os.environ | {HELPS: "1"}, **options)

    requests.Session.send = counted
    helper_process.subprocess = SimpleNamespace(Popen=helper, PIPE=subprocess.PIPE)
    sys.argv = sys.argv[3:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
