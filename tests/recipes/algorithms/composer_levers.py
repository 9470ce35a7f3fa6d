"""Levers in Composer's Trainer, as tests of whole runs put them there and find them again."""

from recipes.engines.composer.adapters import as_algorithms
from recipes.engines.composer.run import ComposerRun
from recipes.training.levers import Levers


def algorithms_of(levers, task):
    """What `Trainer(algorithms=...)` takes for levers of a task."""
    return as_algorithms(Levers(levers), ComposerRun(task))


def lever_in(trainer, kind):
    """The one lever of a kind that a Trainer runs."""
    (found,) = [lever for lever in trainer.state.algorithms[0].levers if isinstance(lever, kind)]
    return found
