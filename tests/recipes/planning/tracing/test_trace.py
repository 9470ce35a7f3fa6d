"""The operations of a pass: which of those that PyTorch dispatches are kernels, and what each moves."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.planning.tracing.trace import trace

B, S, H, D = 2, 5, 3, 8  # samples, positions, heads, and width of each


class Attention(nn.Module):
    """One matrix, attention of which it makes queries, keys and values at once, and a scale; all recomputed."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(H * D, H * D, bias=False)

    def forward(self, batch):
        heads = self.matrix(batch["x"]).view(B, S, H, D).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        return {"total": torch.mul(input=y, other=batch["scale"]).sum()}

    def recomputed_blocks(self):
        return [self]

    def forward_flops(self):
        return None


def test_views_are_no_operations_and_all_tensors_are_moved():
    """A product of (B, S, width) is one of matrices, between views."""
    with torch.device("meta"):
        task = Attention().to(torch.bfloat16)
        found = trace(task, {"x": torch.empty(B, S, H * D), "scale": torch.empty(B, 1, 1, 1)})
    values, matrix = B * S * H * D, (H * D) ** 2
    product, attention, scale, total = found.operations
    assert [o.kind for o in found.operations] == ["product", "attention", "other", "other"]
    assert product.flops == 2 * B * S * matrix and product.bytes == 2 * (values + matrix + values)
    # Queries, keys, values and the result; and a 32-bit sum for each row of scores, which the backward pass reads.
    assert attention.flops == 4 * B * H * S * S * D and attention.bytes == 2 * 4 * values + 4 * B * H * S
    assert scale.bytes == 2 * (values + B + values) and total.bytes - 2 * values in (2, 4)
    assert all(o.recomputed for o in found.operations)
    assert len(list(found.executed(True))) == 4 + 4 + len(found.backward)
