"""Whether a recipe's model has what the run asks of it."""

from __future__ import annotations

from recipes.algorithms.sharding.shard import check_shardable
from recipes.config.recipe import Recipe
from recipes.models.task import Task


def check_model(recipe: Recipe, task: Task) -> None:
    """
    Args:
        recipe: of the run.
        task: its model, on any device.

    Raises:
        ValueError: a method that the run will call, perhaps hours later, is not defined; no parameter is trained; or
            see `check_shardable`.
    """
    exports = any(callback.name == "export" for callback in recipe.callbacks.values())
    loads = recipe.checkpoints.load_weights is not None
    called = {"forward": True, "evaluate": bool(recipe.evals), "export": exports, "load_export": loads}
    kind = type(task)
    missing = [name for name, calls in called.items() if calls and getattr(kind, name) is getattr(Task, name)]
    if missing:
        raise ValueError(
            f"model: {kind.__name__} ({kind.__module__}) does not define {', '.join(missing)}, which this run calls"
        )
    if not any(parameter.requires_grad for parameter in task.parameters()):
        raise ValueError(f"model: {kind.__name__} ({kind.__module__}) has no parameter that requires a gradient")
    if recipe.training.fsdp is not None:
        check_shardable(task, by_block=recipe.training.fsdp.wrap == "blocks")
