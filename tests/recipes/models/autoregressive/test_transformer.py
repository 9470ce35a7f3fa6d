"""The transformer: attention against a naive dense one, embeddings, initial weights, caches."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.sixteen_bit.block_scaling import scale_branch
from recipes.models.autoregressive.masks import TokenLayout, dense_mask, visible, visible_pairs
from recipes.models.autoregressive.sparse_attention import Attend, MaskedAttend, flex_attend, local_attend
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.autoregressive.transformer import (
    MLP,
    CausalAttention,
    Residual,
    TokenTransformer,
)

CPU = torch.device("cpu")
LAYOUT = TokenLayout(5, 4, 3)
KINDS = ["row", "column", "convolution"]


def naive(q, k, v, mask):
    """Attention as written in textbooks, in 64-bit."""
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v.double()


def whole_way(attend, q, k, v):
    """Attention as the transformer calls it: into its order of tokens, and back."""
    heads = q.shape[1]
    tokens = [attend.enter(x.transpose(1, 2).flatten(2)) for x in (q, k, v)]
    out = attend(*(x.unflatten(2, (heads, -1)).transpose(1, 2) for x in tokens))
    return attend.leave(out.transpose(1, 2).flatten(2)).unflatten(2, (heads, -1)).transpose(1, 2)


def compare(attend, layout, kind, device=CPU, heads=2, width=8, tolerance=2e-6, backward=True):
    generator = torch.Generator().manual_seed(3)
    q, k, v, slope = (torch.randn(2, heads, layout.length, width, generator=generator).to(device) for _ in range(4))
    mask = dense_mask(visible(kind, layout), layout.length, device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    own_leaves = [x.clone().requires_grad_(backward) for x in (q, k, v)]
    expected, out = naive(*leaves, mask), whole_way(attend, *own_leaves)
    # 32-bit sums of up to S terms of order 1 beside 64-bit ones.
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=tolerance)
    if backward:
        gradients = torch.autograd.grad((expected * slope).sum(), leaves)
        for one, other in zip(torch.autograd.grad((out * slope).sum(), own_leaves), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [LAYOUT, TokenLayout(3, 2, 5), TokenLayout(2, 7, 3), TokenLayout(1, 1, 11)])
@pytest.mark.parametrize("make", [MaskedAttend, local_attend])
def test_attention_equals_a_naive_one(make, layout, kind):
    compare(make(kind, layout, CPU), layout, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_equals_a_naive_one(kind):
    """Its masks and its order of tokens, run without the compiler, which has no kernels for a CPU here."""
    backward = torch.__version__.startswith("2.7")  # later versions refuse it on a CPU
    compare(flex_attend(kind, LAYOUT, CPU, backend=None), LAYOUT, kind, backward=backward)


def test_flex_attention_is_for_a_gpu():
    with pytest.raises(ValueError, match="attention: flex needs a GPU; use auto"):
        small(implementation="flex")(*tokens())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_flex_attention_equals_a_naive_one(kind):
    layout, device = TokenLayout(256, 32), torch.device("cuda", 0)
    # Its kernels multiply 32-bit inputs in TF32 unless told otherwise: ten bits.
    compare(flex_attend(kind, layout, device), layout, kind, device, width=64, tolerance=5e-3)


def small(layers=3, **changes):
    torch.manual_seed(0)
    sizes = {"layout": LAYOUT, "layers": layers, "width": 16, "heads": 2, "text_vocabulary": 11, "codes": 7}
    network = TokenTransformer(**{**sizes, **changes})
    with torch.no_grad():  # new weights are small: outputs would hide what differs
        for p in network.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return network


def tokens(batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(11, (batch, LAYOUT.text), generator=generator)
    text[0, 3:] = -1
    return text, torch.randint(7, (batch, LAYOUT.image), generator=generator)


def test_implementations_agree():
    text, image = tokens()
    local, masked = small(implementation="local"), small(implementation="masked")
    masked.load_state_dict(local.state_dict())
    torch.testing.assert_close(local(text, image), masked(text, image), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_whole_network_on_a_gpu():
    """FlexAttention beside PyTorch's attention with a mask, in loss and gradients, as training runs them."""
    losses, gradients = [], []
    for attention in ("flex", "masked"):
        torch.manual_seed(0)
        sizes = {"layers": 6, "width": 256, "heads": 4, "text_vocabulary": 500, "codes": 300}
        task = Autoregressive(**sizes, attention=attention).cuda()
        torch.nn.init.normal_(task.network.unembedding.weight, std=0.05)
        generator = torch.Generator("cuda").manual_seed(1)
        batch = {
            "text": torch.randint(500, (2, 256), device="cuda", generator=generator),
            "image": torch.randint(300, (2, 1024), device="cuda", generator=generator),
        }
        with torch.autocast("cuda", torch.bfloat16):
            loss = task(batch)["total"]
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in task.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    # 16-bit attention rounds its weights in other places: some hundredths of the gradient's norm.
    assert (gradients[0] - gradients[1]).norm() < 0.03 * gradients[1].norm()


@torch.no_grad()
def test_no_position_sees_a_later_token():
    network = small()
    text, image = tokens()
    before = network(text, image)
    for position in range(LAYOUT.length):
        changed_text, changed_image = text.clone(), image.clone()
        if position < LAYOUT.text:
            changed_text[:, position] = (text[:, position] + 1) % 11
        else:
            changed_image[:, position - LAYOUT.text] = (image[:, position - LAYOUT.text] + 1) % 7
        after = network(changed_text, changed_image)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-5)
        assert ((after - before)[:, position].abs().amax(-1) > 1e-3).all()
        if position < LAYOUT.text:  # every image token sees all text
            assert ((after - before)[:, LAYOUT.text :].abs().amax(-1) > 1e-4).all()


def test_padding_is_learned_for_each_position_and_used_where_no_token_is():
    network = small()
    text, image = tokens()
    network(text, image).square().sum().backward()
    used = network.text_padding.weight.grad.abs().amax(-1) > 0
    assert used.tolist() == [False, False, False, True, True]  # of the one caption that ends at 3
    embedded = network.embed_text(text)
    padding = network.text_padding.weight + network.text_positions.weight
    assert (embedded[0, 3:] == padding[3:]).all() and (embedded[0, :3] != padding[:3]).all()
    assert not torch.equal(network.text_padding.weight[3], network.text_padding.weight[4])


def test_rows_and_columns_are_broadcast_over_the_grid():
    network = small()
    grid = network.embed_image(torch.zeros(1, LAYOUT.image, dtype=torch.long)).unflatten(1, (4, 4))[0]
    for row in range(4):
        for column in range(4):
            parts = network.image_rows.weight[row] + network.image_columns.weight[column]
            torch.testing.assert_close(grid[row, column], network.image_tokens.weight[0] + parts)
    later = network.embed_image(torch.zeros(1, 3, dtype=torch.long), first=6)
    torch.testing.assert_close(later[0], grid.flatten(0, 1)[6:9])


def test_initial_weights():
    torch.manual_seed(0)
    network = TokenTransformer(
        layout=TokenLayout(4, 4), layers=8, width=256, heads=4, text_vocabulary=500, codes=300
    )  # fmt: skip
    root = math.sqrt(256)
    mlp = network.blocks[1].branch
    expected = {
        network.text_tokens.weight: 0.125 / root,
        network.blocks[0].branch.q.weight: 0.125 / root,
        network.blocks[0].branch.v.weight: 0.125 / root,
        network.blocks[0].branch.out.weight: 0.125 / root / 4,
        mlp.up.weight: 0.125 / root,
        mlp.down.weight: 0.125 / (2 * root) / 4,
    }
    for weight, deviation in expected.items():
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)
        assert weight.mean().item() == pytest.approx(0, abs=deviation / 10)
    assert (network.unembedding.weight == 0).all() and (mlp.up.bias == 0).all()
    assert network.image_rows.weight.std().item() == pytest.approx(0.125 / root / math.sqrt(2), rel=0.1)


def test_under_autocast_branches_have_16_bits_and_the_identity_path_32():
    network, seen = small(), []
    for block in network.blocks:
        block.register_forward_hook(lambda m, given, out: seen.append((given[0].dtype, out.dtype)))
        block.branch.register_forward_hook(lambda m, given, out: seen.append((given[0].dtype, out.dtype)))
    text, image = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        out = network(text, image)
        logits = network.image_logits(out)
    wide, narrow = torch.float32, torch.bfloat16
    assert seen == [(wide, narrow), (wide, wide)] * 6 and out.dtype == logits.dtype == wide
    # Tables that FSDP gathers in 16 bits, too.
    for table in (m for m in network.modules() if isinstance(m, torch.nn.Embedding)):
        table.to(narrow)
    seen.clear()
    with torch.autocast("cpu", narrow):
        network(text, image)
    assert seen == [(wide, narrow), (wide, wide)] * 6


def test_attention_and_mlp_are_blocks_of_their_own():
    network = small()
    assert len(network.blocks) == 6 and all(isinstance(block, Residual) for block in network.blocks)
    names = {name.split(".")[0] for name, _ in network.named_parameters()}
    assert names == {
        "text_tokens", "text_padding", "text_positions", "image_tokens", "image_rows", "image_columns",
        "blocks", "norm", "unembedding",
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 7])
@pytest.mark.parametrize("given", [0, 1, 4, 9, 15])
def test_a_cache_gives_what_the_whole_sequence_gives(layers, given):
    """Token by token, from any number of given tokens on, with several sequences to a caption."""
    network = small(layers).double()
    text, image = tokens()
    image = torch.cat([image, tokens(seed=2)[1]])[[0, 2, 1, 3]]  # two sequences a caption
    image[1::2, :given] = image[::2, :given]
    whole = network(text.repeat_interleave(2, 0), image)
    caches = network.new_caches(repeat=2)
    begun = network(text, image[::2, :given], caches)
    torch.testing.assert_close(begun.repeat_interleave(2, 0), whole[:, : LAYOUT.text + given])
    for number in range(given, LAYOUT.image):
        out = network(None, image[:, number : number + 1], caches)
        torch.testing.assert_close(out[:, 0], whole[:, LAYOUT.text + number])


@torch.no_grad()
def test_a_cache_keeps_only_what_can_be_seen():
    layout = TokenLayout(6, 16, 5)
    torch.manual_seed(0)
    network = TokenTransformer(layout=layout, layers=3, width=8, heads=2, text_vocabulary=4, codes=4)
    caches = network.new_caches()
    network(torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long), caches)
    slots = [layer.slots.count for layer in caches.layers]
    assert slots == [16 + 1, 256, 2 * 16 + 2 + 1]  # row, column, two rows of the neighbourhood
    assert caches.numbers == 2 * 8 * (3 * 6 + sum(slots))


def test_flops():
    network = small(implementation="masked")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        text, image = tokens(1)
        network.unembedding(network(text, image))
    # The counter knows no fused attention on a CPU: two products of a pair and a number of its width, two FLOPs each.
    seen = sum(visible_pairs(kind, LAYOUT) for kind in network.kinds)
    assert network.forward_flops() == counter.get_total_flops() + 2 * 2 * 16 * seen


@pytest.mark.parametrize("changes", [{"heads": 3}, {"layers": 0}])
def test_sizes_that_do_not_divide(changes):
    with pytest.raises(ValueError, match="multiple of the number of heads"):
        small(**{"layers": 2, **changes})


class Kernel(torch.autograd.Function):
    """What a fused kernel of attention keeps: its inputs and its output."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q).copy_(v)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad


class Fused(Attend):
    def __call__(self, q, k, v):
        return Kernel.apply(q, k, v)


@pytest.mark.parametrize(("recomputed", "expected"), [(False, 32), (True, 8)])
def test_activations_of_a_layer(recomputed, expected):
    """Bytes per position and unit of width: for 64 layers, 1,280 positions and a width of 1920, 5 GB per sample."""
    width, length = 64, 24
    blocks = [Residual(CausalAttention(width, 2)), Residual(MLP(width))]
    for block in blocks:
        scale_branch(block.branch, torch.tensor(64.0), torch.zeros((), dtype=torch.int64))
    if recomputed:
        recompute(blocks)
    kept = {}

    def keep(tensor):
        if length in tensor.shape:  # no weights and their 16-bit copies
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(1, length, width, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = blocks[1](blocks[0](x, Fused()))
    numbers = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    statistics = 0 if recomputed else 4 * 4 * length  # means and deviations of two norms
    assert y.dtype == torch.float32 and numbers == expected * length * width + statistics
