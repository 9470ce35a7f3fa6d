"""Whether a recipe's model has what the run asks of it."""

from __future__ import annotations

from torch import Tensor

from recipes.algorithms.sharding.shard import check_shardable
from recipes.config.recipe import Recipe
from recipes.models.task import Task


def check_model(recipe: Recipe, task: Task) -> None:
    """
    Args:
        recipe: of the run.
        task: its model, on any device.

    Raises:
        ValueError: a method that the run will call, perhaps hours later, is not defined; no parameter is trained; the
            weights could not be saved or loaded again; or see `check_shardable`.
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
    if exports:
        task.check_export()
    if not any(parameter.requires_grad for parameter in task.parameters()):
        raise ValueError(f"model: {kind.__name__} ({kind.__module__}) has no parameter that requires a gradient")
    for name, module in task.named_modules():
        if type(module).__name__ == "OptimizedModule":  # PyTorch's: importing it takes seconds
            raise ValueError(
                f"model: {name} of {kind.__name__} is compiled by torch.compile, which changes names of parameters, so "
                "that no run could go on from a checkpoint; compile it in place, as by its method compile()"
            )
    for name, value in task.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"model: {name} of {kind.__name__} is an instance of {type(value).__name__}, and exports hold tensors "
                "alone; return a tensor from get_extra_state, or register a buffer"
            )
    if recipe.training.fsdp is not None:
        check_shardable(task, by_block=recipe.training.fsdp.wrap == "blocks")
