"""How the matrices of a block are sharded; gradients of shards are tested in powersgd_shards_ranks.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard

from recipes.algorithms.powersgd.block_gradients import (
    blocks_of,
    cut_dimension,
    first_device_shapes,
    placements,
    shard_shapes,
)
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.task import Task

SIZES = st.integers(1, 40)


@given(rows=SIZES, columns=SIZES, rest=st.sampled_from([(), (3, 3)]), shards=st.sampled_from([1, 2, 4, 8]))
def test_pieces_are_as_square_as_they_can_be(rows, columns, rest, shards):
    shape = (rows, columns, *rest)
    cut = cut_dimension(shape, 1, shards)
    assert shards > 1 or cut == 0
    assert cut == 0 or columns % shards == 0, "FSDP2 pads the first dimension only"
    (piece,) = shard_shapes(shape, 1, shards)
    assert piece == torch.empty(shape).chunk(shards, dim=cut)[0].shape

    def factors(dimension):
        """Values of both factors of a piece, for each column, where the pieces are even."""
        sides = [rows, columns]
        sides[dimension] /= shards
        return sides[0] + sides[1] * (9 if rest else 1)

    if shards > 1 and columns % shards == 0:
        assert factors(cut) <= factors(1 - cut)


@given(width=SIZES, stacked=st.integers(2, 4), shards=st.sampled_from([1, 2, 4, 8]))
def test_stacked_matrices_are_cut_across_or_not_taken_apart(width, stacked, shards):
    shapes = shard_shapes((stacked * width, width), stacked, shards)
    if width % shards == 0:
        assert shapes == [(width, width // shards)] * stacked
    else:
        assert len(shapes) == 1 and shapes[0][1] == width


def test_a_transformers_layer_is_cut_as_published():
    """Ramesh et al. 2021, table 2: pieces d x d/m of four matrices, d x 4d/m and its transpose of the MLP's."""
    with torch.device("meta"):
        task = Autoregressive(
            layers=2, width=64, heads=2, text_positions=4, text_vocabulary=9, side=4, codes=8, kernel=3
        )  # fmt: skip
    blocks, others = first_device_shapes(task, 8)
    attention, mlp = [(64, 8)] * 3 + [(8, 64)], [(32, 64), (64, 32)]
    assert blocks == [attention, mlp] * 2
    inside = 8 * sum(shape.numel() for block in blocks for shape in block)
    assert others >= (sum(p.numel() for p in task.parameters()) - inside) / 8  # rows are padded
    assert first_device_shapes(task, 1)[0] == [[(64, 64)] * 4, [(256, 64), (64, 256)]] * 2
    dimensions = {name: placements(task, 8).get(id(p)) for name, p in task.named_parameters()}
    assert dimensions["network.blocks.0.branch.qkv.weight"] == Shard(1)
    assert dimensions["network.unembedding.weight"] is dimensions["network.blocks.0.branch.qkv.bias"] is None


def test_matrices_in_one_parameter_have_gradients_in_its_memory():
    class OneLayer(Task):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 6)
            self.layer.stacked = 2

        def blocks(self):
            return [self.layer]

    task = OneLayer()
    ((matrices,),) = blocks_of(task)
    assert matrices.name == "layer.weight" and matrices.shapes == [(3, 3), (3, 3)]
    assert all((g == 0).all() for g in matrices.gradients())  # a parameter that a batch did not use
    matrices.gradients()[1].fill_(5.0)
    assert task.layer.weight.grad.tolist() == [[0.0] * 3] * 3 + [[5.0] * 3] * 3
    whole = torch.arange(18.0).view(6, 3)
    assert torch.equal(matrices.whole(iter(matrices.parts_of(whole))), whole)
