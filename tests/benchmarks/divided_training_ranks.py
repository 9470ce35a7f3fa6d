"""Run on two ranks by test_divided_training.py: ways to train that are right, and others that are not.

argv: the folder of results, and the arguments of divided_training.py.
"""

import sys
from pathlib import Path
from unittest import mock

from benchmarks import divided_training
from benchmarks.common import reporting
from benchmarks.divided_training import Way
from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.training.ranks import rank

# By the name of the run, which changes nothing.
WRONG = [
    Way("clipped less", ("training.grad_clip=2.0",), rate=False),
    Way("gradients twice as large", ("run_name=doubled",), rate=False),
    Way("other weights on each rank", ("run_name=apart",), rate=False),
    Way("not possible", ("training.tensor_parallel=3",), rate=False),
]
ways, trained, clip = divided_training.ways, divided_training.trained, ClipByNorm.clip_gradients


def double_and_clip(lever, run):
    """Adam with its usual `eps` would only notice where the gradient is clipped."""
    for parameter in run.trained:
        parameter.grad *= 2
    clip(lever, run)


def train(recipe):
    """Train, wrongly where the name of the run says so."""
    doubled = recipe.run_name == "doubled"
    with mock.patch.object(ClipByNorm, "clip_gradients", double_and_clip if doubled else clip):
        watch = trained(recipe)
    if recipe.run_name == "apart":
        for tensor in watch.weights.values():
            tensor += 1e-6 * rank()
    return watch


if __name__ == "__main__":
    reporting.RESULTS = Path(sys.argv[1])
    with mock.patch.multiple(divided_training, trained=train, ways=lambda world: [*ways(world), *WRONG]):
        divided_training.main(sys.argv[2:])
