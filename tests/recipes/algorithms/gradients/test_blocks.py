"""Which parameters are matrices of blocks."""

import torch
from torch import nn

from recipes.algorithms.gradients.blocks import block_matrices
from recipes.models.task import Task


class Shared(Task):
    """Two blocks that share a matrix. The first also has an embedding and a frozen matrix."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(2, 2)
        self.first = nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), shared, nn.Linear(2, 2).requires_grad_(False))
        self.second = nn.Sequential(shared, nn.Conv2d(2, 2, 1))

    def blocks(self):
        return [self.first, self.second]


def test_each_matrix_belongs_to_one_block_and_embeddings_to_none():
    task = Shared()
    wanted = [[task.first[2].weight], [task.second[1].weight]]
    found = block_matrices(task, "test")
    assert [[id(p) for p in block] for block in found] == [[id(p) for p in block] for block in wanted]
    assert all(isinstance(p, torch.nn.Parameter) for block in found for p in block)
