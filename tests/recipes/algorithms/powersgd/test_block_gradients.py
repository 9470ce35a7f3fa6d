"""How the matrices of a block are sharded; gradients of shards are tested in powersgd_shards_ranks.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard

from data.cost import Plan, size_text
from recipes.algorithms.powersgd.block_gradients import (
    blocks_of,
    cut_dimension,
    first_device_shapes,
    placements,
    shard_shape,
)
from recipes.algorithms.powersgd.cost import powersgd_cost
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.task import Task

SIZES = st.integers(1, 40)


@given(rows=SIZES, columns=SIZES, rest=st.sampled_from([(), (3, 3)]), shards=st.sampled_from([1, 2, 4, 8]))
def test_pieces_are_as_square_as_they_can_be(rows, columns, rest, shards):
    shape = (rows, columns, *rest)
    cut = cut_dimension(shape, shards)
    assert shards > 1 or cut == 0
    assert cut == 0 or columns % shards == 0, "FSDP2 pads the first dimension only"
    piece = shard_shape(shape, shards)
    assert piece == torch.empty(shape).chunk(shards, dim=cut)[0].shape

    def factors(dimension):
        """Values of both factors of a piece, for each column, where the pieces are even."""
        sides = [rows, columns]
        sides[dimension] /= shards
        return sides[0] + sides[1] * (9 if rest else 1)

    if shards > 1 and columns % shards == 0:
        assert factors(cut) <= factors(1 - cut)


def test_a_transformers_layer_is_cut_as_published():
    """Ramesh et al. 2021, table 2: pieces d x d/m of four matrices, or d/m x d, which have equal factors; d x 4d/m and
    its transpose of the MLP's."""
    with torch.device("meta"):
        task = Autoregressive(
            layers=2, width=64, heads=2, text_positions=4, text_vocabulary=9, side=4, codes=8, kernel=3
        )  # fmt: skip
    blocks, others = first_device_shapes(task, 8)
    attention, mlp = [(8, 64)] * 4, [(32, 64), (64, 32)]
    assert blocks == [attention, mlp] * 2
    inside = 8 * sum(shape.numel() for block in blocks for shape in block)
    assert others >= (sum(p.numel() for p in task.parameters()) - inside) / 8  # rows are padded
    assert first_device_shapes(task, 1)[0] == [[(64, 64)] * 4, [(256, 64), (64, 256)]] * 2
    dimensions = {name: placements(task, 8).get(id(p)) for name, p in task.named_parameters()}
    assert dimensions["network.blocks.1.branch.down.weight"] == Shard(1)
    assert dimensions["network.unembedding.weight"] is dimensions["network.blocks.0.branch.q.bias"] is None
    # With 2 devices that divide matrices, and 4 shards: the same number of values, in pieces of other sides.
    divided, _ = first_device_shapes(task, 4, 2, task.tensor_plan().dimensions())
    assert divided == [[(32, 16)] * 3 + [(16, 32)], [(32, 64), (64, 32)]] * 2


def test_what_it_costs_where_two_devices_divide_matrices():
    """Four shards of the halves of table 2's matrices, 12 d^2 values per layer: each device has a factor of rank 2."""
    with torch.device("meta"):
        task = Autoregressive(
            layers=2, width=64, heads=2, text_positions=4, text_vocabulary=9, side=4, codes=8, kernel=3
        )  # fmt: skip
    args = {"rank": 16, "wire": "32-bit", "buffer": "32-bit", "clip": None}
    plan = Plan(task, 0, 0, replicas=3, shards=8, output="", averaged=False, build=None, tensor=2)
    cost, values = powersgd_cost(args, plan), 2 * 12 * 64**2
    sides = [(16, 32)] * 4 + [(32, 64)] * 2
    factors = 2 * sum(2 * (rows + 2 * columns) for rows, columns in sides)
    assert cost.device_bytes == 4 * values / 8 + 4 * factors and cost.checkpoint_bytes == 4 * values
    ring = 2 * (3 - 1) / 3 * 4
    sent, others = ring * 2 * sum(2 * sum(pair) for pair in sides), first_device_shapes(
        task, 4, 2, task.tensor_plan().dimensions()
    )[1]
    assert cost.sent_bytes == sent + ring * others
    assert f"uncompressed {size_text(ring / 2 * values / 8)} in 16-bit" in cost.sent_note


def test_a_gradient_is_the_parameters_own():
    class OneLayer(Task):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 6)

        def blocks(self):
            return [self.layer]

    task = OneLayer()
    ((matrix,),) = blocks_of(task)
    assert matrix.name == "layer.weight" and matrix.shape == (6, 3)
    assert (matrix.gradient() == 0).all()  # a parameter that a batch did not use
    matrix.gradient()[1].fill_(5.0)
    assert task.layer.weight.grad.tolist() == [[0.0] * 3, [5.0] * 3] + [[0.0] * 3] * 4
    whole = torch.arange(18.0).view(6, 3)
    assert torch.equal(matrix.in_shape(matrix.part_of(whole).T), whole)  # the lesser side first
