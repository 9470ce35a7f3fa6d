"""FlexAttention is compiled once for each shape, and never falls back to uncompiled code."""

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from recipes.models.autoregressive.flex import block_mask, separate
from recipes.models.autoregressive.masks import TokenLayout, visible, visible_by_columns
from recipes.models.autoregressive.sparse_attention import MaskedAttend, flex_attend, resolve

LAYOUT = TokenLayout(3, 2, 3)


class Compiler:
    """A backend that counts compilations, and runs the traced operations as they are."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def heads(batch):
    return [torch.randn(batch, 1, LAYOUT.length, 4) for _ in range(3)]


def test_more_sizes_than_a_function_may_be_compiled_for():
    """As the search for a microbatch tries them; a function shared by all sizes stops after the limit."""
    compiler = Compiler()
    attend, plain = (flex_attend("row", LAYOUT, torch.device("cpu"), backend) for backend in (compiler, None))
    sizes = range(1, 4)
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (*sizes, *sizes):
            q, k, v = heads(size)
            torch.testing.assert_close(attend(q, k, v), plain(q, k, v), rtol=0, atol=1e-6)
    assert compiler.count == len(sizes)


def test_masks_do_not_share_compilations(monkeypatch):
    # Torch 2.11 refuses gradients on a CPU before it compiles; they are not computed here.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiler = Compiler()
        for kind in ("row", "convolution"):
            attend = flex_attend(kind, LAYOUT, torch.device("cpu"), compiler)
            with torch.no_grad():
                attend(*heads(2))
            leaves = [x.requires_grad_() for x in heads(2)]
            attend(*leaves)
    assert compiler.count == 4


def test_running_out_of_compilations_is_an_error():
    compiler = Compiler()
    attend = flex_attend("row", LAYOUT, torch.device("cpu"), compiler)
    attend(*heads(2))
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        attend(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in heads(2)))  # other strides


def test_a_copy_has_a_count_of_its_own():
    def double(x):
        return 2 * x

    compiler = Compiler()
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (2, 3, 4):
            own = torch.compile(separate(double), backend=compiler, dynamic=False, fullgraph=True)
            assert torch.equal(own(torch.ones(size)), torch.full((size,), 2.0))
    assert compiler.count == 3


def test_short_sequences_are_not_for_flex_attention():
    """Below 128 positions PyTorch would take another kernel."""
    short, long = TokenLayout(8, 8), TokenLayout(64, 8)
    assert resolve("auto", short, "cuda", 64) == "masked" and resolve("auto", long, "cuda", 64) == "flex"
    assert resolve("flex", long, "cuda", 16) == "flex"
    with pytest.raises(ValueError, match="flex is for sequences of 128 or more positions, and these have 72"):
        resolve("flex", short, "cuda", 64)
    assert [resolve("auto", TokenLayout(8, side), "cpu", 8) for side in (8, 16)] == ["masked", "local"]


def test_narrow_heads_are_not_for_flex_attention():
    """PyTorch has no kernels for heads narrower than 16."""
    layout = TokenLayout(64, 8)
    assert [resolve("auto", layout, "cuda", width) for width in (8, 16)] == ["masked", "flex"]
    with pytest.raises(ValueError, match="flex is for heads of width 16 or more, and these have 8; use auto or masked"):
        resolve("flex", layout, "cuda", 8)


def computed_blocks(kind, layout, queries, keys):
    """The number of blocks with a visible pair, for text and grid sides that blocks divide.

    Each block of queries sees the keys from `first` to its own last one, and all text.
    """
    back = {"row": layout.side, "column": 0, "convolution": layout.kernel // 2 * (layout.side + 1)}[kind]
    count = 0
    for start in range(0, layout.length, queries):
        last = (start + queries - 1) // keys
        if start < layout.text:
            count += last + 1
        else:
            first = max(start - back, layout.text) // keys
            count += layout.text // keys + last - first + 1
    return count


@pytest.mark.parametrize("block", [(128, 128), (128, 64)])
@pytest.mark.parametrize("kind", ["row", "column", "convolution"])
def test_only_blocks_with_visible_pairs_are_computed(kind, block):
    layout = TokenLayout(256, 32, 11)
    sees = visible_by_columns(layout) if kind == "column" else visible(kind, layout)
    mask = block_mask(sees, layout.length, torch.device("cpu"), block)
    found = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert found == computed_blocks(kind, layout, *block)
    published = {"row": (34, 61), "column": (27, 54), "convolution": (40, 74)}  # of 100 and 200
    assert found == published[kind][block == (128, 64)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_many_sizes_on_a_gpu():
    """More than PyTorch compiles of one function. The limit is a setting of the process, which other tests raise."""
    layout, device = TokenLayout(64, 8), torch.device("cuda", 0)
    attend, masked = (make("column", layout, device) for make in (flex_attend, MaskedAttend))
    limit = 4
    with torch._dynamo.config.patch(recompile_limit=limit):
        for size in range(1, limit + 3):
            q, k, v = (torch.randn(size, 2, layout.length, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
            order = _in_columns(layout, device)
            out = attend(*(x[:, :, order] for x in (q, k, v)))
            # 16-bit outputs of order 1, rounded in different places
            torch.testing.assert_close(out, masked(q, k, v)[:, :, order], rtol=0, atol=3e-2)
    assert len(attend.flex.compiled) == limit + 2


def _in_columns(layout, device):
    grid = torch.arange(layout.image, device=device).unflatten(0, (layout.side, layout.side)).T.flatten()
    return torch.cat([torch.arange(layout.text, device=device), layout.text + grid])
