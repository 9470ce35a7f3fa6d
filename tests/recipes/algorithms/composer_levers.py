"""Levers in Composer's Trainer, as tests of whole runs put them there."""

from pathlib import Path

from recipes.algorithms.sharding.fsdp import Sharding
from recipes.engines.checkpoints.files import CheckpointFiles
from recipes.engines.composer.adapters import as_algorithms
from recipes.engines.composer.checkpoints import WholeCheckpoints
from recipes.engines.composer.load_planner import LoadPlanner, Sharded
from recipes.engines.composer.run import ComposerRun
from recipes.training.checkpoint_names import KINDS
from recipes.training.levers import Levers


def algorithms_of(levers, task):
    """What `Trainer(algorithms=...)` takes for levers of a task."""
    return as_algorithms(Levers(levers), ComposerRun(task))


def sharding_of(task):
    """The lever that shards a task as a whole, SHARD_GRAD_OP."""
    return Sharding(task, full_shard=False, by_block=False, parameters="fp32", replicas=1, sync="microbatch")


def sharded_options(levers, task, checkpoints="full", full_shard=False, folder=None, due=None):
    """What `Trainer(...)` takes for levers of a task, one of which shards it.

    Args:
        levers, task: of the run.
        checkpoints: their kind, "full" or "sharded".
        full_shard: whether the lever frees parameters between the passes.
        folder: of checkpoints; None: none is saved.
        due: whether one is saved, by Composer's state and event.
    """
    task._fsdp_wrap = False  # Composer wraps nothing more
    run, planner = ComposerRun(task), LoadPlanner(task)
    config = Sharded(reshard_after_forward=full_shard, state_dict_type=checkpoints, planner=planner)
    options = {
        "algorithms": as_algorithms(Levers(levers), run, planner),
        "parallelism_config": {"fsdp": config},
    }
    if folder is not None:  # Composer's own saver cannot save DTensors of levers
        files = CheckpointFiles(Path(folder), KINDS["composer"], -1)
        options["callbacks"] = [WholeCheckpoints(files, due, run)]
    return options
