"""Signals that ask a run to stop."""

import os
import signal

import pytest

from recipes.training import stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_between_batches_a_signal_waits(number):
    before = signal.getsignal(number)
    with stop.stop_signals(), stop.between_batches():
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested() and stop.caught() == signal.Signals(number).name
    assert signal.getsignal(number) is before and not stop.requested()


def test_before_the_first_batch_a_signal_ends_the_process(tmp_path):
    child = os.fork()
    if not child:
        os.dup2(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), 1)
        with stop.stop_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == stop.EXIT_CODE == 85


def test_the_exit_code():
    with pytest.raises(SystemExit) as error:
        raise stop.StartAgain
    assert error.value.code == 85
