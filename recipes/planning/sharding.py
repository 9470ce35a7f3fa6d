"""Whether a recipe's model can be trained with `training.fsdp`."""

from __future__ import annotations

from recipes.algorithms.sharding.shard import check_shardable
from recipes.config.recipe import Recipe
from recipes.models.task import Task


def check_sharding(recipe: Recipe, task: Task) -> None:
    """
    Args:
        recipe: of the run.
        task: its model, on any device.

    Raises:
        ValueError: see `check_shardable`.
    """
    if recipe.training.fsdp is not None:
        check_shardable(task, by_block=recipe.training.fsdp.wrap == "blocks")
