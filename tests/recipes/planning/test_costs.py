"""Components say what they cost; the dry run asks them and knows none by name."""

import sys
from types import SimpleNamespace

import pytest

from data.cost import Cost, Files, Plan, all_reduce_bytes, count_text, size_text, with_cost
from recipes.config.values import Component
from recipes.planning.costs import Costs, cost_of

PLAN = Plan(task=None, parameters=30, trained=20, replicas=2, shards=4, output="out", averaged=True, build=lambda x: x)


@with_cost(lambda args, plan: Cost(device_bytes=args["size"] * plan.trained / plan.shards, note=args["note"]))
def a_function(task, *, size: int, note: str = "by default"):
    """A builder function with a cost."""


class AClass:
    def __init__(self, *, every: str | None = None) -> None:
        """A component class with a cost."""

    @classmethod
    def cost(cls, args, plan):
        return Cost(lines=(f"{cls.__name__} {args['every']} {plan.averaged}",))


def without(*, anything: int = 1):
    """A builder that says nothing of its cost."""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(f=a_function, c=AClass, w=without))


def ask(name, **args):
    return cost_of(Component("algorithm", name, args, f"made_up:{name}", f"algorithms.{name}"), PLAN)


def test_defaults_are_filled_in():
    assert ask("f", size=4) == Cost(device_bytes=20, note="by default")
    assert ask("f", size=4, note="given").note == "given"
    assert ask("c").lines == ("AClass None True",)


def test_a_component_that_says_nothing_costs_nothing():
    assert ask("w") == Cost()


class Method:
    def __init__(self, *, anything: int = 1) -> None:
        """A component with a method of this name."""

    def cost(self, samples, rate):
        return samples * rate


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (5, "cost of without returns an instance of int instead of a Cost"),
        (Cost(lines="one line"), "cost of without returns a Cost whose lines is an instance of str"),
        (Cost(files=("1ba", "a file", "here")), "cost of without returns a Cost whose files is an instance of tuple"),
        (Cost(files=Files(every=5, what="", folder="here")), "cost of without returns a Cost whose files.every is 5"),
        (None, "`cost` of Method is no class method that takes `args` and `plan`"),
    ],
)
def test_what_is_no_cost_is_said(cost, said, monkeypatch):
    """Dry runs ended with a traceback, or printed a text letter by letter."""

    monkeypatch.setattr(without, "cost", lambda args, plan: cost, raising=False)
    name = "Method" if cost is None else "without"
    with pytest.raises(ValueError, match=f"^algorithms.own: {said}"):
        cost_of(Component("algorithm", "own", {}, f"{__name__}:{name}", "algorithms.own"), PLAN)


def test_sums():
    algorithms = {"a": Cost(checkpoint_bytes=3, averaged_bytes=5), "b": Cost(checkpoint_bytes=4, gathered="fp16")}
    costs = Costs(data=Cost(), evals={}, optimizer=Cost(checkpoint_bytes=8), algorithms=algorithms, callbacks={})
    assert (costs.checkpoint_bytes(0), costs.averaged_bytes, costs.gathered) == (15, 5, "fp16")


def test_texts():
    assert [size_text(size) for size in (5e5, 9.9e8, 2.5e9)] == ["0.5 MB", "990.0 MB", "2.5 GB"]
    assert [count_text(1, "step"), count_text(2000, "step")] == ["1 step", "2,000 steps"]
    assert count_text(3, "batch", "batches") == "3 batches"
    assert all_reduce_bytes(8, 4) == 12
