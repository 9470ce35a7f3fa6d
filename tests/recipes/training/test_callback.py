"""What a callback of your own must define."""

import pytest

from recipes.training.callback import PeriodicCallback


class Nothing(PeriodicCallback):
    def acts(self, run):
        raise AssertionError("not called")


def test_a_periodic_callback_that_defines_no_act_would_do_nothing():
    with pytest.raises(ValueError, match=r"^Nothing \(.*test_callback\) does nothing: define its method act\(run\)"):
        Nothing("2ba")


def test_a_periodic_callback_may_act_in_another_hook():
    class AtSteps(PeriodicCallback):
        def step_end(self, run):
            if self.due(run.clock):
                raise AssertionError("not called")

    AtSteps("2ba")
