"""Levers in Composer's Trainer, as tests of whole runs put them there."""

from composer.utils import FSDP2Config

from recipes.algorithms.sharding.fsdp import Sharding
from recipes.engines.composer.adapters import as_algorithms
from recipes.engines.composer.run import ComposerRun
from recipes.training.levers import Levers


def algorithms_of(levers, task):
    """What `Trainer(algorithms=...)` takes for levers of a task."""
    return as_algorithms(Levers(levers), ComposerRun(task))


def sharding_of(task):
    """The lever that shards a task as a whole, SHARD_GRAD_OP."""
    return Sharding(task, full_shard=False, by_block=False, parameters="fp32", replicas=1, sync="microbatch")


def fsdp_options(task, checkpoints="full"):
    """What `Trainer(...)` takes beside the lever of a task that is sharded, for checkpoints of a kind."""
    task._fsdp_wrap = False  # Composer wraps nothing more
    return {"parallelism_config": {"fsdp": FSDP2Config(reshard_after_forward=False, state_dict_type=checkpoints)}}
