"""What a Composer trainer's adapters hold, for tests that look at it."""


def lever_of(trainer, kind):
    """The one lever of a kind."""
    (found,) = [lever for lever in trainer.state.algorithms[0].levers if isinstance(lever, kind)]
    return found


def callback_of(trainer, kind):
    """The one callback of a kind."""
    callbacks = [getattr(adapted, "callback", None) for adapted in trainer.state.callbacks]
    (found,) = [callback for callback in callbacks if isinstance(callback, kind)]
    return found
