"""Training with CUDA graphs is training without, here with graphs that a CPU emulates."""

import copy
import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from recipes.algorithms.graphs import block_graphs, cuda_graphs
from recipes.algorithms.graphs.block_graphs import WARM_UPS, with_own_memory
from recipes.algorithms.graphs.cuda_graphs import CudaGraphs
from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.models.kernels.device_graph import is_for_graph
from tests.recipes.algorithms.graphs.emulated import EmulatedGraph, emulate
from tests.recipes.engines.recording import record
from tests.recipes.engines.shipped import small
from tests.recipes.training.fake_run import FakeRun


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    emulate(monkeypatch)


class Block(nn.Module):
    """Takes and returns tensors in tuples; two outputs are one tensor, and one parameter is not used."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.shift = nn.Parameter(torch.randn(width))
        self.unused = nn.Parameter(torch.randn(width))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, context, scale=1.0, *, earlier=()):
        self.calls += 1
        y = self.two(self.dropout(torch.tanh(self.one(x) + context))) * scale + self.shift
        for e in earlier:
            y = y + e
        return y, (y, x + y)


class Net(nn.Module):
    """Three blocks with long skip connections, layers outside of them, and a tensor that changes between two blocks."""

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.inner = nn.ModuleList(Block(width) for _ in range(3))

    def blocks(self):
        return list(self.inner)

    def networks(self):
        return [self]

    def forward(self, x):
        context, shift = self.first(x), x.new_zeros(6)
        h, one = self.inner[0](context, context, earlier=(shift,))
        shift += 0.5
        h, two = self.inner[1](h, context, 0.5, earlier=(shift,))
        h, _ = self.inner[2](h, context=x, earlier=(*one, two[1]))
        return self.last(h)


@contextmanager
def kept_by_autocast():
    """Weights that autocast converts are kept to the end of this context, as `working_weights` keeps them."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def trained(net, lever, passes=(1, 1, 2, 3, 1), sizes=(4,), cast=False):
    """Losses and weights of a few steps, with dropout.

    `passes` are the microbatches of each step, and `sizes` the samples of these in turn.
    """
    run = FakeRun(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    if lever:
        lever.begin(run)
    losses = []
    for step, count in enumerate(passes):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with kept_by_autocast():
            for number in range(count):
                x = torch.randn(sizes[number % len(sizes)], 6, dtype=net.first.weight.dtype)
                if lever:
                    lever.before_forward(run)
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    loss = net(x).to(x.dtype).square().mean()
                loss.backward()
                if lever:
                    lever.after_backward(run)
                losses.append(loss.item())
            if lever:
                lever.before_step(run)
        optimizer.step()
    return losses, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_training_is_the_same(whole, cast):
    dtype = torch.float32 if cast else torch.float64
    plain, net = Net().to(dtype), Net().to(dtype)
    lever = CudaGraphs(net, whole=whole)
    losses, weights = trained(net, lever, cast=cast)
    others, expected = trained(plain, None, cast=cast)
    # The same kernels on the same values, but gradients of what several blocks read are added in another order. Under
    # autocast these have 8 bits.
    tolerance = {"rtol": 0.01, "atol": 0.003} if cast else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(losses, others, **tolerance)
    for one, two in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, two, **tolerance)
    assert all(forward.called for forward in lever.forwards) and len(lever.forwards) == (1 if whole else 3)
    assert [b.calls.item() for b in net.inner] == [b.calls.item() for b in plain.inner]
    assert all(block.unused.grad is None for block in net.inner)


def test_what_is_captured_knows_it(monkeypatch):
    """Kernels are then chosen by the GPU's time alone. Calls of other shapes, and validation, are not captured."""
    net, seen = Net(), []
    plain = Block.forward
    monkeypatch.setattr(Block, "forward", lambda *a, **k: seen.append(is_for_graph()) or plain(*a, **k))
    trained(net, CudaGraphs(net), passes=(2,), sizes=(4, 2))
    tries = (WARM_UPS + 1) * [True]  # the last one is captured
    assert seen == [*3 * tries, *3 * [False]]


def test_graphs_of_a_later_microbatch_have_memory_of_their_own(monkeypatch):
    """Those of the first one have left memory that they use again when they run: between the passes of the others."""
    pools = []

    class Known(EmulatedGraph):
        def __init__(self, pool):
            super().__init__(pool)
            pools.append(pool)

    class Longer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
            self.depth = 1

        def blocks(self):
            return list(self.inner)

        def forward(self, x):
            for block in self.inner[: self.depth]:
                x = x + block(x)
            return x

    monkeypatch.setattr(block_graphs, "DeviceGraph", Known)
    monkeypatch.setattr(cuda_graphs, "memory_pool", object)
    net = Longer()
    plain, lever, run = copy.deepcopy(net), CudaGraphs(net), FakeRun(net)
    lever.begin(run)
    for net.depth in (1, 2, 2):
        plain.depth, x = net.depth, torch.randn(4, 6)
        lever.before_forward(run)
        net(x).square().sum().backward()
        plain(x).square().sum().backward()
        lever.after_backward(run)
    forward, backward, *later = pools
    assert forward is backward and len(later) == 2 and later[0] is later[1] is not forward
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_other_shapes_run_without(capsys):
    plain, net = Net().double(), Net().double()
    lever = CudaGraphs(net)
    losses, weights = trained(net, lever, passes=(3, 3), sizes=(4, 4, 2))
    others, expected = trained(plain, None, passes=(3, 3), sizes=(4, 4, 2))
    torch.testing.assert_close(losses, others, rtol=1e-12, atol=0)
    for one, two in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    assert capsys.readouterr().out.count("Block runs without graphs where its inputs have other shapes") == 3


def test_validation_sampling_and_a_search_run_without():
    net = Net()
    lever = CudaGraphs(net)
    lever.begin(FakeRun(net))
    lever.before_forward(None)
    with torch.no_grad():
        net(torch.randn(4, 6))
    net.eval()
    net(torch.randn(4, 6))
    net.train()
    lever.pause(True)
    net(torch.randn(4, 6))
    lever.before_step(None)  # nothing was captured, and nothing should
    assert not any(forward.called for forward in lever.forwards)
    for samples in (2, 1):  # a search may come again, and find another size
        former = [forward.graphs for forward in lever.forwards]
        lever.pause(True)
        lever.pause(False)
        lever.before_forward(None)
        net(torch.randn(samples, 6))
        assert all(forward.called and forward.graphs not in former for forward in lever.forwards)


def test_weights_and_buffers_at_other_addresses_are_captured_again(capsys):
    plain, net = Net().double(), Net().double()
    lever = CudaGraphs(net)
    for model, its_lever in ((plain, None), (net, lever)):
        trained(model, its_lever)
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data
    losses, _ = trained(net, lever)
    others, _ = trained(plain, None)
    torch.testing.assert_close(losses, others, rtol=1e-12, atol=0)
    assert capsys.readouterr().out.count("blocks are captured again") == 1
    for model, its_lever in ((plain, None), (net, lever)):
        for block in model.inner:
            block.calls.data = block.calls.clone()
        trained(model, its_lever, passes=(1,))
    assert capsys.readouterr().out.count("blocks are captured again") == 1
    assert [b.calls.item() for b in net.inner] == [b.calls.item() for b in plain.inner]


class Twice(Net):
    def forward(self, x):
        x = self.first(x)
        return self.inner[0](self.inner[0](x, x)[0], x)[0]


class Elsewhere(Net):
    """A block that trains a parameter of another module."""

    def __init__(self):
        super().__init__()
        self.inner[2].borrowed = (self.last.weight,)
        self.inner[2].forward = lambda x, context, earlier: (x @ self.inner[2].borrowed[0], ())


class Around(Net):
    """Blocks of which one is not called, but its parts are."""

    def forward(self, x):
        h, _ = self.inner[0](x, x)
        return self.inner[2].one(self.inner[1](h, x)[0])


class Tied(Net):
    """Blocks that share a weight."""

    def __init__(self):
        super().__init__()
        self.inner[2].one.weight = self.inner[0].one.weight


class TiedOutside(Net):
    """A block that shares a weight with a layer outside of the blocks."""

    def __init__(self):
        super().__init__()
        self.inner[2].one.weight = self.last.weight


class Replacing(Net):
    """A block whose statistics are another tensor after each call."""

    def __init__(self):
        super().__init__()
        self.inner[1].forward = self._replace

    def _replace(self, x, context, *args, **more):
        self.inner[1].calls = self.inner[1].calls + 1
        return Block.forward(self.inner[1], x, context, *args, **more)


class Reading(Net):
    """A block that makes what follows depend on its values."""

    def __init__(self):
        super().__init__()
        self.inner[1].forward = self._raise

    def _raise(self, *args, **more):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Twice, "Block is called twice in a forward pass"),
        (Elsewhere, "Block cannot be captured: it trains a tensor that is neither one of its parameters nor"),
        (Around, "nothing was captured, as Block ran without being called through its forward; set whole: true"),
        (Tied, "inner.0.one.weight and inner.2.one.weight are one parameter of .*; capture them .* whole: true"),
        (TiedOutside, "last.weight and inner.2.one.weight are one parameter of modules that are captured apart"),
        (Replacing, "Block cannot be captured: each call puts another tensor in the place of its buffer calls; write"),
        (Reading, "Block cannot be captured: operation not permitted when stream is capturing; remove the lever"),
    ],
)
def test_what_cannot_be_captured(net, message):
    made = net()
    with pytest.raises((RuntimeError, ValueError), match=message):
        trained(made, CudaGraphs(made))


@pytest.mark.parametrize("net", [Tied, TiedOutside])
def test_what_blocks_share_is_captured_as_a_whole(net):
    plain, made = net().double(), net().double()
    losses, weights = trained(made, CudaGraphs(made, whole=True))
    others, expected = trained(plain, None)
    torch.testing.assert_close(losses, others, rtol=1e-12, atol=0)
    for one, two in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_an_output_that_the_loss_needs_later():
    """The backward pass was captured for the outputs on which the loss depended."""
    net = Net()
    lever = CudaGraphs(net)
    lever.begin(FakeRun(net))
    for number, both in enumerate((False, True)):
        lever.before_forward(None)
        y, (_, z) = net.inner[0](torch.randn(4, 6, requires_grad=True), torch.randn(4, 6))
        loss = (y + z if both else y).sum()
        if number:
            with pytest.raises(RuntimeError, match="the loss depends on other outputs than before"):
                loss.backward()
        else:
            loss.backward()


def test_a_copy_of_the_model_runs_without():
    net = Net()
    trained(net, CudaGraphs(net), passes=(1,))
    other = copy.deepcopy(net)
    other.inner[0].one.weight.data.zero_()
    assert not torch.equal(*(model.inner[0](torch.ones(4, 6), torch.zeros(4, 6))[0] for model in (net.eval(), other)))
    assert not any(block.forward.graphs for block in other.inner)


def test_tensors_of_a_microbatch_are_not_kept():
    net = Net()
    lever = CudaGraphs(net)
    lever.begin(FakeRun(net))
    for _ in range(2):
        lever.before_forward(None)
        x = torch.randn(4, 6)
        context = net.first(x)
        y, (_, z) = net.inner[0](context, context)
        (y + z).sum().backward()
        lever.after_backward(None)
        kept = [weakref.ref(tensor) for tensor in (x, context, y, z)]
        del x, context, y, z
        gc.collect()
        assert [ref() for ref in kept] == [None] * 4


def test_gradients_get_memory_of_their_own():
    """Also where several are one tensor or have other strides, and where the parameter says where it is."""
    values = torch.randn(4, 4, 3, 3)
    shared, elsewhere, strided, given, alone = (nn.Parameter(torch.zeros(4, 4, 3, 3)) for _ in range(5))
    strided.data = strided.data.to(memory_format=torch.channels_last)
    given.main_grad = torch.zeros(4, 4, 3, 3)
    own = values.clone()
    parameters = [shared, elsewhere, strided, given, alone, nn.Parameter(torch.zeros(1))]
    results = with_own_memory([values, values, own, values, own, None], parameters, [])
    assert results[0] is values and results[3] is given.main_grad and results[4] is own and results[5] is None
    assert len({r.data_ptr() for r in results[:5]}) == 5
    for result, parameter in zip(results[:5], parameters, strict=False):
        assert torch.equal(result, values) and result.stride() == parameter.stride()
    assert with_own_memory([values], [shared], [values[0]])[0] is not values


@pytest.mark.parametrize("hooked", [False, True])
def test_hooks_of_complete_gradients_are_called(hooked):
    net = Net()
    counts = {}
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: counts.update({name: (counts.get(name, (0,))[0] + 1, p.grad is not None)})
        )
    trained(net, CudaGraphs(net) if hooked else None, passes=(1, 2))
    assert counts == {name: (3, True) for name, _ in net.named_parameters() if "unused" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), [("sd2_base", "composer"), ("dalle_12b", "lightning")])
def test_a_recipe_trains_the_same(name, engine, latent_sets, token_sets, tmp_path):
    """With all its levers: gradients of channels_last images, 16-bit norms, one gradient scale per block."""
    found, sets = [], {"latent_sets": latent_sets, "token_sets": token_sets}
    for number, graphs in enumerate(("null", "{name: cuda_graphs}")):
        made = small(name, sets, tmp_path / str(number), sharded=False)
        path = tmp_path / f"{number}.yaml"
        path.write_text(to_yaml(made))
        changes = [f"algorithms.graphs={graphs}", "training={tensor_parallel: 1, microbatch: 4}"]
        changes += ["training.duration=3ba", "algorithms={powersgd: null, activation_checkpointing: null}"]
        seen = record(engine, load_config(path, changes, Recipe))
        (lever,) = [lever for lever in seen.levers if isinstance(lever, CudaGraphs)] or [None]
        assert (lever is not None and all(f.called for f in lever.forwards)) == bool(number)
        found.append(seen)
    # Products have 8 bits, and gradients of what several blocks read are added in another order.
    torch.testing.assert_close(found[0].losses, found[1].losses, rtol=1e-3, atol=0)
