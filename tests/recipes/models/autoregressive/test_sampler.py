"""Sampling: the same tokens with and without a cache, choices by their distributions, completion, guidance."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.models.autoregressive.masks import TokenLayout
from recipes.models.autoregressive.sampler import Choice, Drawing, choose, pad_captions, sample_tokens, uniforms
from recipes.models.autoregressive.transformer import TokenTransformer
from tests.recipes.algorithms.graphs.emulated import EmulatedGraph
from tests.recipes.models.autoregressive.sampling_on_stub_gpu import TOKENS
from tests.stub_gpu import needs_stub_gpu

LAYOUT = TokenLayout(4, 5, 3)
ALL = LAYOUT.image


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    network = TokenTransformer(layout=LAYOUT, layers=6, width=24, heads=3, text_vocabulary=9, codes=30)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return network


TEXT = torch.tensor([[3, 1, 8, 0], [2, 5, -1, -1]])


def draw(each=2, seed=0):
    return uniforms([seed + i for i in range(2 * each)], ALL).unflatten(0, (2, each))


@torch.no_grad()
def sample_without_cache(network, text, uniform, choice, given=None):
    """The whole sequence is computed for each token, one sequence after the other."""
    grids = torch.zeros(*uniform.shape, dtype=torch.int64)
    for caption in range(len(text)):
        for number in range(uniform.shape[1]):
            tokens = text.new_zeros(1, ALL)
            start = 0 if given is None else given.shape[1]
            tokens[:, :start] = 0 if given is None else given[caption]
            for place in range(start, ALL):
                captions = [torch.full_like(text[:1], -1), text[caption : caption + 1]]
                null, logits = (
                    network.image_logits(network(c, tokens)[:, text.shape[1] + place - 1]) for c in captions
                )
                if choice.guidance != 1:
                    logits = null + choice.guidance * (logits - null)
                tokens[:, place] = choose(logits, uniform[caption, number, place : place + 1], choice)
            grids[caption, number] = tokens[0]
    return grids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_in_16_bits_give_the_bits_of_autocast(network, dtype):
    """Of 12 billion parameters, autocast's copies are 24 GB beside 48."""
    cast = copy.deepcopy(network)
    cast.cast_blocks(dtype)
    matrices = [p for name, p in cast.blocks.named_parameters() if "norm" not in name]
    assert len(matrices) == 6 * (8 + 4) and {p.dtype for p in matrices} == {dtype}
    assert sum(p.dtype == dtype for p in cast.parameters()) == len(matrices)
    moved = copy.deepcopy(network)
    moved.cast_blocks(dtype, "meta")  # stands for a GPU
    assert sum(p.is_meta and p.dtype == dtype for p in moved.parameters()) == len(matrices)
    image = torch.arange(2 * ALL).view(2, ALL) % 30
    with torch.autocast("cpu", dtype), torch.no_grad():
        assert torch.equal(network(TEXT, image), cast(TEXT, image))
    with torch.autocast("cpu", dtype):
        tokens = [sample_tokens(n, TEXT, draw(), Choice(guidance=2.0)) for n in (network, cast)]
    assert torch.equal(*tokens)


class Operators(TorchDispatchMode):
    """The names of all operators, and the shapes that they read and wrote."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        self.found.append((str(func), [tuple(t.shape) for t in tensors]))
        return result


def test_every_token_after_the_first_has_the_same_operators(network):
    """Nothing depends on the number of the token, and nothing is read by the host: they can be one CUDA graph."""
    found = []
    for start in (0, 7, ALL - 2):
        drawing = Drawing(network, TEXT, draw(), Choice(guidance=2.0, top_k=9), torch.ones(2, start).long())
        with torch.no_grad():
            drawing.first_token(drawing.first_logits())
        with Operators() as operators, torch.no_grad():
            drawing.next_tokens(ALL - start - 1, None)
        found.append(operators.found)
    one = found[-1]
    assert len(one) > 200 and found == [one * (ALL - 1), one * (ALL - 8), one]
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & {name for name, _ in one}


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("given", [0, ALL - 3, ALL - 4])
def test_a_graph_draws_the_same_tokens(network, given, guidance, precision):
    """On the CPU the kernels are recorded and run again on the same memory. While they are recorded nothing runs."""
    rows = torch.arange(2 * given).view(2, given) % 30
    graph, choice = EmulatedGraph(None), Choice(guidance=guidance, top_p=0.9)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        plain = sample_tokens(network, TEXT, draw(), choice, rows)
        graphed = sample_tokens(network, TEXT, draw(), choice, rows, graph)
    assert torch.equal(graphed, plain)
    assert bool(graph.operators) == (given < ALL - 3)  # the first token, and two before the graph is captured


@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(temperature=0.5),
        Choice(top_k=5),
        Choice(top_p=0.7),
        Choice(guidance=3.0, top_k=9, top_p=0.9, temperature=1.3),
    ],
)
def test_a_cache_changes_no_token(network, choice):
    cached = sample_tokens(network, TEXT, draw(), choice)
    uncached = sample_without_cache(network, TEXT, draw(), choice)
    assert cached.shape == (2, 2, ALL) and cached.dtype == torch.int64
    assert (cached == uncached).all()
    assert len(cached.unique(dim=1)[0]) > 1  # sequences of one caption differ
    assert len(cached.unique()) > 5


def test_completion_keeps_what_is_given(network):
    rows = torch.randint(30, (2, 2 * LAYOUT.side), generator=torch.Generator().manual_seed(1))
    cached = sample_tokens(network, TEXT, draw(), Choice(), rows)
    assert (cached[:, :, : rows.shape[1]] == rows[:, None]).all()
    assert (cached == sample_without_cache(network, TEXT, draw(), Choice(), rows)).all()
    # A grid completed from a start of its own is that grid again.
    whole = sample_tokens(network, TEXT, draw(1), Choice())
    assert (sample_tokens(network, TEXT, draw(1), Choice(), whole[:, 0, :7]) == whole).all()
    everything = torch.zeros(2, ALL, dtype=torch.int64)
    assert (sample_tokens(network, TEXT, draw(), Choice(), everything) == 0).all()
    with pytest.raises(ValueError, match="26 image tokens are given, a grid has 25"):
        sample_tokens(network, TEXT, draw(), Choice(), torch.zeros(2, ALL + 1, dtype=torch.int64))


def test_a_sequence_depends_on_its_caption_and_seed_alone(network):
    together = sample_tokens(network, TEXT, draw(3), Choice())
    for caption in range(2):
        for number in range(3):
            alone = uniforms([3 * caption + number], ALL)[None]
            one = sample_tokens(network, TEXT[caption : caption + 1], alone, Choice())
            assert (one[0, 0] == together[caption, number]).all()


def test_guidance_moves_away_from_the_empty_caption(network):
    plain = sample_tokens(network, TEXT, draw(), Choice())
    assert (sample_tokens(network, TEXT, draw(), Choice(guidance=1.0)) == plain).all()
    assert (sample_tokens(network, TEXT, draw(), Choice(guidance=4.0)) != plain).any()
    empty = torch.full_like(TEXT, -1)
    # Nothing to move away from.
    guided = sample_tokens(network, empty, draw(), Choice(guidance=4.0))
    assert (guided == sample_tokens(network, empty, draw(), Choice())).all()


@pytest.mark.parametrize("token", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"guidance": 2.0}], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_sequence_of_logits_that_are_not_finite_is_lost_alone(network, token, options, wrong):
    """As of a network that overflows in 16 bits. The number of a token would be one above the last code."""
    choice, calls = Choice(**options), []
    plain = sample_tokens(network, TEXT, draw(), choice)
    broken = copy.deepcopy(network)
    logits_of = broken.image_logits

    def image_logits(hidden):
        logits = logits_of(hidden).clone()
        calls.append(None)
        if len(calls) == token + 1:
            logits[0] = wrong  # the first caption; after the first token only its first sequence
        return logits

    broken.image_logits = image_logits
    tokens = sample_tokens(broken, TEXT, draw(), choice)
    lost = (tokens < 0).all(2)
    assert lost[0, 0] and lost.sum() == (lost.shape[1] if token == 0 else 1)
    assert torch.equal(tokens[~lost], plain[~lost]) and len(calls) == LAYOUT.image


def test_compiled_blocks_are_compiled_for_training_only():
    """Once for the MLP and at most once for each kind of mask, however many layers; sampling compiles nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    network = TokenTransformer(layout=LAYOUT, layers=10, width=8, heads=2, text_vocabulary=9, codes=30)
    torch.nn.init.normal_(network.unembedding.weight)
    plain = sample_tokens(network, TEXT, draw(), Choice())
    for block in network.blocks:
        block.compile(backend="eager", dynamic=False)
    for _ in range(2):
        network(TEXT, plain[:, 0])
        assert (sample_tokens(network, TEXT, draw(), Choice()) == plain).all()
    assert 2 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    torch._dynamo.reset()


@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=12),
    st.floats(0, 1, exclude_max=True, width=32),
    st.one_of(st.none(), st.integers(1, 14)),
    st.one_of(st.none(), st.floats(0.05, 1)),
    st.floats(0.2, 3),
)
@settings(max_examples=200)
def test_a_chosen_token_is_one_that_may_be(values, uniform, top_k, top_p, temperature):
    logits = torch.tensor([values])
    choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p)
    (token,) = choose(logits, torch.tensor([uniform]), choice).tolist()
    probability = (logits[0].double() / temperature).softmax(0)
    allowed = sorted(range(len(values)), key=lambda i: (-probability[i].item(), i))[:top_k]
    if top_p is not None:
        total, kept = sum(probability[i].item() for i in allowed), []
        for i in allowed:
            if sum(probability[j].item() for j in kept) >= top_p * total * (1 + 1e-9):
                break
            kept.append(i)
        allowed = kept
    assert token in allowed


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, -torch.inf])
    count = 4000
    uniform = (torch.arange(count) + 0.5) / count  # evenly spread: shares come out to 1 / count
    for choice, kept in [
        (Choice(temperature=2.0), [0, 1, 2, 3]),
        (Choice(top_k=2), [1, 3]),
        (Choice(top_p=0.7), [1, 3]),  # the likeliest alone has 0.64
        (Choice(top_p=0.6), [1]),
        (Choice(top_k=2, top_p=0.7), [1]),  # of the two that are left it has 0.73
    ]:
        tokens = choose(logits.expand(count, 5), uniform, choice)
        scaled = torch.full((5,), -torch.inf)
        scaled[kept] = logits[kept] / choice.temperature
        shares = tokens.bincount(minlength=5) / count
        torch.testing.assert_close(shares, scaled.softmax(0), rtol=0, atol=1.5 / count)
    halves = choose(torch.zeros(count, 2), uniform, Choice(top_p=0.5))
    assert not halves.any()  # the first one alone has the half
    impossible = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert choose(impossible, torch.zeros(1), Choice()) == 1
    all_left = choose(logits.expand(count, 5), uniform, Choice(top_k=5, top_p=1.0))
    assert (all_left == choose(logits.expand(count, 5), uniform, Choice())).all()  # the same images by the same seeds


def test_captions_are_cut_at_their_end():
    assert pad_captions([[5, 6, 7, 8], [9], []], 3).tolist() == [[5, 6, 7], [9, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": 1e-310},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"guidance": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
    ids=str,
)
def test_choices_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Choice(**wrong)


@needs_stub_gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_graph_is_launched_in_place_of_a_token(stub_gpu):
    """On a GPU that computes nothing: the host waits for no token, and may capture all that it does for one."""
    done = stub_gpu(Path(__file__).with_name("sampling_on_stub_gpu.py"))
    rows = [json.loads(line.removeprefix("row: ")) for line in done.stdout.splitlines() if line.startswith("row: ")]
    assert len(rows) == 4, done.stdout + done.stderr
    for eager, graphed in (rows[:2], rows[2:]):
        (launches, waits, _), (fewer, _, strays) = eager, graphed
        assert waits == 0 and strays == 0
        one = launches / TOKENS
        assert one > 100 and launches % TOKENS == 0
        # Two tokens before, then a graph for each of ten; PyTorch launches few kernels to capture one.
        assert 10 <= fewer - 2 * one < 16
