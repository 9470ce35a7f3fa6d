"""What a callback of your own must define."""

import pytest

from recipes.training.callback import PeriodicCallback


class Nothing(PeriodicCallback):
    def acts(self, run):
        raise AssertionError("not called")


def test_a_periodic_callback_that_defines_no_act_would_do_nothing():
    with pytest.raises(ValueError, match=r"^Nothing \(.*test_callback\) does nothing: define its method act\(run\)"):
        Nothing("2ba")
