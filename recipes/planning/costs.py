"""The costs of a recipe's components, as each component reports them (see `data.cost`)."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass

from torch import nn

from data.cost import FLOAT, Cost, Epoch, Files, Plan
from recipes.config.build import build, import_builder, located
from recipes.config.recipe import Recipe
from recipes.config.values import Component
from recipes.planning.devices import Devices
from recipes.planning.inputs import local_manifests
from recipes.planning.tensor_parallel import divided_share

KINDS = {"lines": (tuple, list), "files": (Files, type(None)), "epoch": (Epoch, type(None)), "note": str}  # of a Cost


@dataclass(frozen=True)
class Costs:
    """The costs of a recipe's components.

    Attributes:
        data: of the training data.
        evals: of each validation set, by label.
        optimizer: of the optimizer.
        algorithms: of each algorithm, by label.
        callbacks: of each callback, by label.
    """

    data: Cost
    evals: dict[str, Cost]
    optimizer: Cost
    algorithms: dict[str, Cost]
    callbacks: dict[str, Cost]

    def checkpoint_bytes(self, parameters: int) -> int:
        """Size of a checkpoint of a model with this many parameters, averaged weights excluded."""
        state = sum(cost.checkpoint_bytes for cost in (self.optimizer, *self.algorithms.values()))
        return FLOAT * parameters - 2 * self.stored_16_bit + state

    @property
    def stored_16_bit(self) -> int:
        """Number of trained values that are stored in 16 bits, with their gradients."""
        return sum(cost.stored_16_bit for cost in self.algorithms.values())

    @property
    def buckets(self) -> bool:
        """Whether gradients are averaged in 32-bit buckets beside those of several microbatches; see `Cost`."""
        return all(cost.buckets for cost in self.algorithms.values())

    @property
    def averaged_bytes(self) -> int:
        """Size of averaged weights in a checkpoint; 0 where nothing is averaged."""
        return sum(cost.averaged_bytes or 0 for cost in self.algorithms.values())

    @property
    def gathered(self) -> str | None:
        """The number format of gathered blocks, where an algorithm sets it."""
        return next((cost.gathered for cost in self.algorithms.values() if cost.gathered), None)


def parameter_counts(task: nn.Module) -> tuple[int, int]:
    """The number of parameters of a model, and of those that are trained."""
    counts = [(p.numel(), p.requires_grad) for p in task.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def plan_of(recipe: Recipe, task: nn.Module, devices: Devices) -> Plan:
    """What the components of a recipe are told to report their costs.

    Args:
        recipe: of the run.
        task: its model, on the meta device.
        devices: of the run.
    """
    parameters, trained = parameter_counts(task)
    return Plan(
        task=task,
        parameters=parameters,
        trained=trained,
        replicas=devices.replicas,
        shards=devices.shards * devices.tensor,
        output=recipe.output,
        averaged=False,
        build=build,
        tensor=devices.tensor,
        matrices=divided_share(task, devices),
    )


def costs_of(recipe: Recipe, plan: Plan) -> Costs:
    """Collect the costs of all components. Callbacks come last: theirs depend on whether weights are averaged.

    Raises:
        ValueError: what a component finds wrong, such as a manifest that does not fit the recipe.
    """
    data, optimizer = cost_of(recipe.data, plan), cost_of(recipe.optimizer, plan)
    validation = dataclasses.replace(plan, training=False)
    evals = {label: cost_of(component, validation) for label, component in recipe.evals.items()}
    algorithms = {label: cost_of(component, plan) for label, component in recipe.algorithms.items()}
    averaged = any(cost.averaged_bytes is not None for cost in algorithms.values())
    manifest = next(iter(local_manifests(recipe).values()), None)
    plan = dataclasses.replace(plan, averaged=averaged, manifest=manifest)
    callbacks = {label: cost_of(component, plan) for label, component in recipe.callbacks.items()}
    return Costs(data=data, evals=evals, optimizer=optimizer, algorithms=algorithms, callbacks=callbacks)


def cost_of(component: Component, plan: Plan) -> Cost:
    """The cost of one component, for all of its arguments, including defaults."""
    builder = import_builder(component)
    if not hasattr(builder, "cost"):
        return Cost()
    parameters = inspect.signature(builder).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    with located(component):
        try:
            inspect.signature(builder.cost).bind({}, plan)
        except TypeError:  # such as a method of its objects
            raise ValueError(
                f"`cost` of {builder.__name__} is no class method that takes `args` and `plan`, as dry runs call it "
                "(data/cost.py); make it one, or give it another name"
            ) from None
        cost = builder.cost({**defaults, **component.args}, plan)
        wrong = _wrong(cost)
        if wrong is not None:
            raise ValueError(f"cost of {builder.__name__} returns {wrong}; see data/cost.py")
        return cost


def _wrong(cost: object) -> str | None:
    """What is wrong about the types of a cost that a component of one's own reports; None: nothing."""
    if not isinstance(cost, Cost):
        return f"an instance of {type(cost).__name__} instead of a Cost"
    for name, kinds in KINDS.items():
        if not isinstance(getattr(cost, name), kinds):
            return f"a Cost whose {name} is an instance of {type(getattr(cost, name)).__name__}"
    if cost.files is not None and not isinstance(cost.files.every, str | None):
        return f"a Cost whose files.every is {cost.files.every!r:.60} instead of an interval such as 500ba"
    return None
