"""Optimizers of one's own with which a run would go wrong."""

from contextlib import nullcontext

import pytest
import torch

from recipes.engines import check_optimizers


def test_the_step_of_an_optimizer_takes_a_closure():
    """Lightning gave it one in the first batch, where it was a TypeError."""

    class Bare(torch.optim.SGD):
        def step(self):
            raise AssertionError("not called")

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    check_optimizers.check_step(torch.optim.SGD(parameters, lr=1.0), on_cpu=True)
    with pytest.raises(ValueError, match=r"^optimizer: Bare.step \(.*\) takes no closure; define step\(self, closure="):
        check_optimizers.check_step(Bare(parameters, lr=1.0), on_cpu=True)


def test_zero_grad_takes_what_pytorch_gives_to_it():
    """Lightning gave it in the first batch, and Composer when a run went on, where it was a TypeError."""

    class Bare(torch.optim.SGD):
        def zero_grad(self):
            raise AssertionError("not called")

    with pytest.raises(ValueError, match=r"^optimizer: Bare.zero_grad \(.*\) takes no set_to_none, which PyTorch"):
        check_optimizers.check_step(Bare([torch.nn.Parameter(torch.zeros(2))], lr=1.0), on_cpu=True)


def test_steps_that_need_a_closure_and_weights_that_are_exchanged():
    """Lightning gave a closure that computes nothing; nobody called train() and eval()."""

    class Averages(torch.optim.SGD):
        def train(self):
            raise AssertionError("not called")

        eval = train

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"^optimizer: LBFGS.step \(.*\) needs a closure, and a run gives it none"):
        check_optimizers.check_step(torch.optim.LBFGS(parameters), on_cpu=True)
    with pytest.raises(ValueError, match=r"^optimizer: Averages \(.*\) has train\(\) and eval\(\), which a run"):
        check_optimizers.check_step(Averages(parameters, lr=1.0), on_cpu=True)


def test_options_of_pytorch_with_which_no_step_can_be_made():
    """They were a traceback of PyTorch at the first step."""
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    capturable = torch.optim.Adam(parameters, capturable=True)
    check_optimizers.check_step(capturable, on_cpu=False)
    with pytest.raises(ValueError, match="^optimizer: Adam has capturable=True, which is for GPUs, and this run"):
        check_optimizers.check_step(capturable, on_cpu=True)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(ValueError, match=f"^optimizer: {kind.__name__} has differentiable=True, which no weights"):
            check_optimizers.check_step(kind(parameters, lr=1.0, differentiable=True), on_cpu=False)

    class Own(torch.optim.Optimizer):
        def step(self, closure=None):
            raise AssertionError("not called")

    check_optimizers.check_step(Own(parameters, {"differentiable": True, "capturable": True}), on_cpu=True)


class Outer(torch.optim.Optimizer):
    """Wraps another optimizer, and keeps its own state beside it."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


class Slow(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"slow": 1}


class Divided(torch.optim.SGD):
    def state_dict(self):
        raise RuntimeError("Optimizer state has not been consolidated on this rank.")


@pytest.mark.parametrize(("make", "said"), [
    (lambda ps: Divided(ps, lr=1.0), r"Divided.state_dict \(.*\) fails, and .*: RuntimeError Optimizer state"),
    (lambda ps: torch.optim.SGD(ps[:1], lr=1.0), r"SGD leaves out bias, which would not be trained; give it all"),
    (lambda ps: torch.optim.SGD([{"params": []}, {"params": ps}, {"params": []}], lr=1.0),
     r"SGD has groups without parameters \(0, 2\), and no run could go on from a checkpoint; leave them out"),
    (lambda ps: Slow(ps, lr=1.0), r"Slow.state_dict \(.*\) has 'slow', and checkpoints hold state and param_groups"),
    (lambda ps: Outer(torch.optim.SGD(ps, lr=1.0)), r"Outer \(.*\) keeps the state of its inner apart, and"),
    (lambda ps: torch.optim.SGD([{"params": ps, "rule": Outer}], lr=1.0), r"SGD: state_dict returns 'groups' with a"),
])  # fmt: skip
def test_what_checkpoints_of_an_optimizer_would_not_hold(make, said):
    task = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"^optimizer: {said}"):
        check_optimizers.check_kept(make(list(task.parameters())), dict(task.named_parameters()), saved=True)


def test_a_state_that_is_not_loaded_from_checkpoints_is_found_at_the_first_step():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            self.state[self.param_groups[0]["params"][0]]["kind"] = Outer

    task = torch.nn.Linear(2, 2)
    for saved in (False, True):
        optimizer = Odd(task.parameters(), lr=1.0)
        check_optimizers.check_first_step(optimizer, task, saved)
        if saved:
            with pytest.raises(ValueError, match="^optimizer: Odd: state_dict returns 'state' with a value"):
                optimizer.step()
        optimizer.step()


def test_what_a_state_dict_leaves_out_need_not_be_loaded():
    """Its checkpoints were whole, as they hold what state_dict returns."""

    class Cached(torch.optim.SGD):
        kept = "momentum_buffer"

        def step(self, closure=None):
            self.state["cache"]["kind"] = self.state[self.param_groups[0]["params"][0]]["kind"] = Outer
            super().step()

        def state_dict(self):
            state = self.state[self.param_groups[0]["params"][0]]
            return {"state": {0: {self.kept: state.get(self.kept)}}, "param_groups": []}

    task = torch.nn.Linear(2, 1, bias=False)
    refused = pytest.raises(ValueError, match="^optimizer: Cached: state_dict returns 'state' with a value that is not")
    for kept, found in (("momentum_buffer", nullcontext()), ("kind", refused)):
        optimizer = Cached(task.parameters(), lr=1.0, momentum=0.9)
        optimizer.kept = kept
        check_optimizers.check_first_step(optimizer, task, saved=True)
        task(torch.ones(1, 2)).sum().backward()
        with found:
            optimizer.step()


def test_states_of_no_parameter_are_found_at_the_first_step():
    """They were a KeyError of PyTorch at the first checkpoint."""

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            self.state["all"]["steps"] = 1

    task = torch.nn.Linear(2, 2)
    optimizer = Counts(task.parameters(), lr=1.0)
    check_optimizers.check_first_step(optimizer, task, saved=True)
    with pytest.raises(ValueError, match=r"^optimizer: Counts \(.*\) has a state of 'all', which is no parameter"):
        optimizer.step()


def test_a_parameter_that_the_first_batch_makes_is_found_after_it():
    """It was not trained, and the run could not go on: the checkpoint was called one of another model."""
    task = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    check_optimizers.check_first_step(optimizer, task, saved=False)
    task.late = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="^model: late.weight and 1 more: made in the first batch, so that the optimi"):
        optimizer.step()


def test_adafactor_does_not_update_parts_of_parameters():
    """With two ranks, updates of PyTorch's differed from those of whole parameters by as much as the learning rate."""
    task = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adafactor(task.parameters())
    trained = dict(task.named_parameters())
    check_optimizers.check_kept(optimizer, trained, saved=False)
    with pytest.raises(ValueError, match="^optimizer: Adafactor of PyTorch makes other updates of sharded parameters"):
        check_optimizers.check_kept(optimizer, trained, saved=False, divided=True)
