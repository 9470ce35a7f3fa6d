"""Checks of `block_all_reduce` on two ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recipes.algorithms.gradients.block_all_reduce import BlockAllReduce, groups_of
from recipes.algorithms.graphs.cuda_graphs import CudaGraphs
from recipes.algorithms.modules.working_weights import WorkingWeights
from recipes.engines.data_parallel import data_parallel
from recipes.models.task import Task
from recipes.training.levers import Levers
from tests.recipes.algorithms.graphs.emulated import emulate
from tests.recipes.algorithms.graphs.test_cuda_graphs import Net
from tests.recipes.algorithms.modules.test_working_weights import AutocastRun, Casts, Layers
from tests.recipes.training.fake_run import FakeRun, train

PASSES = 3


class Blocks(Task):
    """Convolutions in channels_last, a weight that two blocks share, one in 64 bits, one that only some ranks use,
    parameters outside of the blocks, and a buffer."""

    def __init__(self, shares=True):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), self.first[1] if shares else nn.Conv2d(4, 4, 1))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.second.register_parameter("wide", self.wide)
        self.last = nn.Linear(4, 4)
        self.unused, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.randn(3))
        self.to(memory_format=torch.channels_last)

    def blocks(self):
        return [self.first, self.second]

    def forward(self, x, uses):
        x = self.second(self.first(x)).mean((2, 3)) * self.wide
        loss = self.last(x.float()).square().mean()
        return loss + self.unused.sum() if uses else loss


def gradients_of_rank(rank):
    """The task, and its gradients by name after all passes of one rank, without averaging."""
    torch.manual_seed(0)
    task = Blocks()
    for number in range(PASSES):
        task(*batch_of(rank, number)).backward()
    return task, {name: p.grad for name, p in task.named_parameters() if p.requires_grad}


def batch_of(rank, number):
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(2, 4, 3, 3, generator=generator), rank == 1


def mean(name, wire):
    """Of both ranks. Halved first, as what is sent is; in two ranks the order of additions does not matter."""
    both = [gradients_of_rank(rank)[1][name] for rank in (0, 1)]
    dtype = wire if both[1].dtype == torch.float32 else both[1].dtype
    return sum(torch.zeros_like(both[1]) if g is None else g.to(dtype).div(2) for g in both).to(both[1].dtype)


def averaged(wire, steps=1, shares=True):
    """A task whose gradients the lever has averaged, and the events of the last step: sizes of messages, and the
    beginning of the backward pass of the first block."""
    torch.manual_seed(dist.get_rank())  # only the first rank has the weights that all begin with
    task = data_parallel(Blocks(shares), averaged=True)
    run = FakeRun(task)
    lever = BlockAllReduce(task, wire=wire)
    levers = Levers([lever])
    levers.call("begin", run)
    levers.call("begin", run)  # the same trainer may fit a second time
    send = dist.all_reduce
    for _ in range(steps):
        events = []

        def noted(buffer, *arguments, events=events, **options):
            events.append(buffer.numel())
            return send(buffer, *arguments, **options)

        task.zero_grad(set_to_none=True)
        run.passes, run.pass_number = PASSES, -1
        with mock.patch.object(dist, "all_reduce", noted):
            for number in range(PASSES):
                run.pass_number += 1
                x, uses = batch_of(dist.get_rank(), number)
                hook = task.first.register_full_backward_pre_hook(lambda *_, events=events: events.append("first"))
                levers.call("before_forward", run)
                loss = task(x, uses)
                levers.call("before_backward", run)
                loss.backward()
                levers.call("after_backward", run)
                hook.remove()
    task(x, uses)  # a pass that is not of training sends nothing
    return task, events


def means(folder):
    for wire in ("fp32", "bf16"):
        task, _ = averaged(wire, steps=2)
        for name, p in task.named_parameters():
            if p.requires_grad:
                assert torch.equal(p.grad, mean(name, {"fp32": torch.float32, "bf16": torch.bfloat16}[wire])), name
                assert p.grad.dtype == p.dtype and p.grad.stride() == p.stride(), name
    assert task.frozen.grad is None
    assert torch.equal(task.table, gradients_of_rank(0)[0].table)  # all begin with the first rank's


def messages(folder):
    """The gradients of a block are sent once per batch, before the backward pass of the block before it begins, and
    those outside of blocks last."""
    task, events = averaged("fp32")
    wide, second, first, rest = (sum(p.numel() for p in group) for group in groups_of(task))
    assert wide == 4 and rest == 4 * 4 + 4 + 3
    # The second block is complete with the first, because both share a weight.
    assert events == ["first"] * (PASSES - 1) + [wide, "first", second, first, rest]
    task, events = averaged("fp32", shares=False)
    wide, second, first, rest = (sum(p.numel() for p in group) for group in groups_of(task))
    assert events == ["first"] * (PASSES - 1) + [wide, second, "first", first, rest]


def working_weights(folder):
    """Also where 16-bit copies of weights are kept over microbatches, blocks are sent before the last backward pass has
    ended. New copies are made once for that, whatever the number of microbatches."""
    task, events = Layers(), []
    first, second = (sum(p.numel() for p in block.parameters()) for block in task.blocks())
    task.blocks()[0].register_full_backward_pre_hook(lambda *_: events.append("first"))
    send = dist.all_reduce

    def noted(buffer, *arguments, **options):
        events.append(buffer.numel())
        return send(buffer, *arguments, **options)

    run = AutocastRun(task, duration="1ba", precision="amp_bf16")
    data = [{"x": torch.randn(4 * PASSES, 6)}]
    with mock.patch.object(dist, "all_reduce", noted), Casts((5, 6), (4, 5)) as casts:
        train(run, data, levers=[WorkingWeights(task), BlockAllReduce(task)], microbatch=4)
    assert events[: PASSES + 2] == ["first"] * (PASSES - 1) + [second, "first", first]
    assert casts.count == 2 * 2


def graphs(folder):
    """With CUDA graphs, here emulated, which complete the gradients of a block at once."""
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        plain, net = Net().double(), Net().double()
        run = FakeRun(net)
        levers = Levers([BlockAllReduce(net), CudaGraphs(net)])
        levers.call("begin", run)
        for passes in (1, PASSES, PASSES, 1):
            for model in (plain, net):
                model.zero_grad(set_to_none=True)
                run.passes, run.pass_number = passes, -1
                for number in range(passes):
                    torch.manual_seed(10 * number + dist.get_rank())
                    run.pass_number += 1
                    for moment in ("before_forward", "before_backward") if model is net else ():
                        levers.call(moment, run)
                    model(torch.randn(4, 6, dtype=torch.float64)).square().mean().backward()
                    if model is net:
                        levers.call("after_backward", run)
            for one, two in zip(plain.parameters(), net.parameters(), strict=True):
                expected = torch.zeros_like(one) if one.grad is None else one.grad / 2
                dist.all_reduce(expected)
                torch.testing.assert_close(two.grad, expected, rtol=1e-12, atol=1e-14)
        # Graphs write gradients to the memory that is sent.
        for block in net.blocks():
            written = block.forward.graphs.parameter_gradients
            assert all(g is None or g is p.main_grad for p, g in zip(block.parameters(), written, strict=True))
            assert sum(g is not None for g in written) == 5


CHECKS = {
    "block_all_reduce: means": means,
    "block_all_reduce: messages": messages,
    "block_all_reduce: working weights": working_weights,
    "block_all_reduce: graphs": graphs,
}
