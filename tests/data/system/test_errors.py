"""Errors of the system that a command ends by in one line."""

import multiprocessing.popen_fork
import os
import resource
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from benchmarks.killing import fork
from recipes.config.command_line import user_errors

NOBODY = 65534  # the limit does not hold for root


def allow_no_more():
    if os.getuid() == 0:
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def thread():
    allow_no_more()
    threading.Thread(target=print).start()


def process():
    allow_no_more()
    multiprocessing.get_context("fork").Process(target=print).start()


def of_pytorch():
    allow_no_more()
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # not the default group: another test may have left one


@pytest.mark.parametrize("starts", [thread, process, of_pytorch])
def test_the_limit_of_processes_is_one_line(starts, tmp_path):
    def run():
        sys.stderr = sys.__stderr__  # not what pytest has put there
        torch.set_num_threads(1)
        with user_errors():
            starts()

    child = fork(run, tmp_path / "log.txt", {})
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = (tmp_path / "log.txt").read_text()
    assert status == 2 and said.startswith("error: no further process or thread can be started; raise"), said
    assert said.count("\n") == 1, said
