"""Each residual block compiles as one graph, all blocks with the same mask share it, and results are the same."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.modules.compile import compile_forwards
from recipes.algorithms.sixteen_bit.block_scaling import scale_branch
from recipes.models.autoregressive.sparse_attention import flex_attend
from recipes.models.autoregressive.task import Autoregressive

LAYERS = 4  # masks: row, column, row, convolution
CPU = torch.device("cpu")
BACKWARD = torch.__version__.startswith("2.7")  # later versions refuse FlexAttention's backward pass on a CPU


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def made(scaled, recomputed):
    torch.manual_seed(0)
    sizes = {"text_positions": 3, "text_vocabulary": 11, "side": 2, "codes": 7, "kernel": 3}
    task = Autoregressive(layers=LAYERS, width=16, heads=2, **sizes)
    with torch.no_grad():  # new weights are small: outputs would hide what differs
        for p in task.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    network = task.network
    shared = {kind: flex_attend(kind, network.layout, CPU, backend=None) for kind in set(network.kinds)}
    network._attends[CPU] = [shared[kind] for kind in network.kinds]
    filtered = torch.zeros(2 * LAYERS, dtype=torch.int64)
    if recomputed:
        recompute(task.blocks())
    if scaled:
        for block, scale, count in zip(task.blocks(), torch.full((2 * LAYERS,), 64.0), filtered, strict=True):
            scale_branch(block.branch, scale, count)
    return task, filtered


def trained(task, scaled):
    """Loss and gradients of a step, in 16 bits."""
    batch = {"text": torch.tensor([[1, 2, 3], [4, 5, -1]]), "image": torch.arange(8).reshape(2, 4) % 7}
    with torch.autocast("cpu", torch.bfloat16, enabled=not scaled):
        loss = task(batch)["total"]
    loss.backward()
    return [loss.detach(), *(p.grad for p in task.parameters())]


@pytest.mark.skipif(not BACKWARD, reason="FlexAttention trains on a GPU only")
@pytest.mark.parametrize(("scaled", "recomputed"), [(False, False), (True, True)])
def test_blocks_are_one_graph_each_and_share_it(scaled, recomputed):
    compiled = []

    def compiler(graph, inputs):
        compiled.append(graph)
        return aot_eager(graph, inputs)

    plain, _ = made(scaled, recomputed)
    expected = trained(plain, scaled)
    task, filtered = made(scaled, recomputed)
    compile_forwards(task.blocks(), {"backend": compiler, "dynamic": False, "fullgraph": True})
    for one, other in zip(trained(task, scaled), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(compiled) == 4  # three masks, and the MLP
    assert not filtered.any()


def test_a_whole_network_is_one_graph_from_the_first_batch_on():
    """Masks are made outside of it, for each model of a process."""
    compiled = []

    def compiler(graph, inputs):
        compiled.append(graph)
        return graph

    sizes = {"text_positions": 3, "text_vocabulary": 11, "side": 2, "codes": 7, "kernel": 3}
    for number in (1, 2):
        task = Autoregressive(layers=1, width=16, heads=2, **sizes)
        compile_forwards(task.networks(), {"backend": compiler, "dynamic": False, "fullgraph": True})
        for _ in range(2):
            trained(task, scaled=True)
        assert 1 <= len(compiled) <= number  # PyTorch 2.11 takes the first model's graph for the second, too
