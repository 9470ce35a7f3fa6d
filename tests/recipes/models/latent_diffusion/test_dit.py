"""The diffusion transformer: what it depends on, its start, its equality with a naive reference, and its files."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from recipes.models.latent_diffusion.dit import DiT, grid_positions, positions

CPU = torch.device("cpu")
SIZES = {"width": 16, "layers": 2, "heads": 2, "text_width": 12, "latent_channels": 3, "patch_size": 2}


def new(seed=0, **changes):
    """A small network. Some of its layers start at zero, and would hide differences, so all are disturbed."""
    torch.manual_seed(seed)
    network = DiT(**SIZES | changes)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network.eval()


def inputs(count=3, height=4, width=6):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(count, 3, height, width, generator=generator)
    return latents, torch.tensor([0.0, 333.3, 1000.0])[:count], torch.randn(count, 5, 12, generator=generator)


@pytest.mark.parametrize("changes", [{}, {"text_layers": 1}, {"cross_attention": False}, {"patch_size": 1}])
def test_a_sample_depends_on_its_own_inputs_only(changes):
    network, (latents, times, text) = new(**changes), inputs()
    with torch.no_grad():
        whole = network(latents, times, text)
        single = torch.cat([network(latents[i : i + 1], times[i : i + 1], text[i : i + 1]) for i in range(3)])
        assert whole.shape == latents.shape
        torch.testing.assert_close(whole, single, rtol=1e-4, atol=1e-5)  # sums in another order
        for changed in ((latents + 1, times, text), (latents, times + 50, text), (latents, times, text + 1)):
            assert ((network(*changed) - whole).abs().amax((1, 2, 3)) > 1e-3).all()


def test_it_starts_with_zero():
    torch.manual_seed(0)
    assert DiT(**SIZES)(*inputs()).abs().max() == 0


def attention(query, key, value, heads):
    """Attention (N, D) of one sample, head by head."""
    rows = []
    for q, k, v in zip(query.chunk(heads, 1), key.chunk(heads, 1), value.chunk(heads, 1), strict=True):
        rows.append(torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1) @ v)
    return torch.cat(rows, dim=1)


def norm(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()


def test_it_is_what_the_papers_describe():
    """One sample, one patch at a time where that is possible, in float64."""
    network, (latents, times, text) = new(text_layers=1).double(), inputs(1)
    latents, text = latents.double(), text.double()
    patches = [latents[0, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(-1) for i in range(2) for j in range(3)]
    x = network.x_embedder(torch.stack(patches)) + grid_positions(2, 3, 16, CPU)
    y = network.y_embedder(text[0]) + positions(torch.arange(5), 16)
    for block in network.y_blocks:
        q, k, v = (layer(block.norm1(y)) for layer in (block.attn.q, block.attn.k, block.attn.v))
        y = y + block.attn.proj(attention(q, k, v, 2))
        y = y + block.mlp(block.norm2(y))
    y = network.y_norm(y)
    pool = network.y_pool
    k, v = pool.k_linear(y), pool.v_linear(y)
    pooled = pool.proj(attention(pool.q_linear(network.y_query[0]), k, v, 2))
    c = network.t_embedder(positions(times, 256).double()) + network.y_pooled(pooled)
    c = c * torch.sigmoid(c)
    for block in network.layers:
        shift1, scale1, gate1, shift2, scale2, gate2 = block.adaLN_modulation(c).chunk(6, 1)
        q, k, v = (layer(norm(x) * (1 + scale1) + shift1) for layer in (block.attn.q, block.attn.k, block.attn.v))
        x = x + gate1 * block.attn.proj(attention(q, k, v, 2))
        cross = block.cross_attn
        x = x + cross.proj(attention(cross.q_linear(x), cross.k_linear(y), cross.v_linear(y), 2))
        x = x + gate2 * block.mlp(norm(x) * (1 + scale2) + shift2)
    shift, scale = network.final_layer.adaLN_modulation(c).chunk(2, 1)
    out = network.final_layer.linear(norm(x) * (1 + scale) + shift)
    expected = torch.zeros_like(latents)
    for n, patch in enumerate(out):
        i, j = divmod(n, 3)
        expected[0, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = patch.reshape(3, 2, 2)
    # Times are embedded in float32, by sums in another order.
    torch.testing.assert_close(network(latents, times, text), expected, rtol=1e-6, atol=1e-6)


def test_places_and_times_are_embedded_by_sinusoids():
    values = [0.0, 3.0, 999.5]
    angles = [[value / 10000 ** (i / 4) for i in range(4)] for value in values]
    expected = [[*map(math.cos, row), *map(math.sin, row)] for row in angles]
    torch.testing.assert_close(positions(torch.tensor(values), 8), torch.tensor(expected), rtol=0, atol=2e-4)
    row, column = positions(torch.tensor([2.0, 4.0]), 8)
    assert torch.equal(grid_positions(3, 5, 16, CPU)[2 * 5 + 4], torch.cat([row, column]))


def test_initial_weights_are_those_of_the_published_networks():
    """Uniform by Xavier's rule for the matrices there, of which some are rows of a larger one; or normal."""
    torch.manual_seed(0)
    network = DiT(**SIZES | {"width": 64, "text_width": 32})
    block = network.layers[0]
    uniform = [(block.attn.q, 4 * 64), (block.attn.proj, 2 * 64), (block.cross_attn.v_linear, 3 * 64)]
    uniform += [(block.mlp.fc1, 5 * 64), (network.y_embedder, 32 + 64), (network.y_pool.k_linear, 3 * 64)]
    for layer, sides in uniform:
        bound = math.sqrt(6 / sides)
        assert 0.97 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
    # Two attentions, an MLP of four times the width, and six vectors of modulation, each with its bias.
    assert sum(p.numel() for p in block.parameters()) == (4 + 4 + 8 + 6) * 64**2 + (4 + 4 + 5 + 6) * 64
    assert network.final_layer.adaLN_modulation.weight.shape == (2 * 64, 64)
    for weight in (network.t_embedder.fc1.weight, network.t_embedder.fc2.weight, network.y_pooled.fc1.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)


@given(height=st.integers(1, 9), width=st.integers(1, 9))
@settings(max_examples=20)
def test_every_place_of_a_grid_has_its_own_embedding(height, width):
    found = grid_positions(height, width, 16, CPU)
    assert found.shape == (height * width, 16)
    apart = torch.cdist(found, found) + 10 * torch.eye(height * width)
    assert apart.min() > 1e-2


@pytest.mark.parametrize("changes", [{"text_layers": 1}, {"cross_attention": False}])
def test_what_is_saved_is_opened(tmp_path, changes):
    network = new(**changes)
    network.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    opened, other = DiT.open(tmp_path).eval(), new(seed=1, **changes)
    other.load(tmp_path)
    for again in (opened, other):
        assert (again(*inputs()) == network(*inputs())).all()
    assert json.loads((tmp_path / "config.json").read_text())["layers"] == 2
    with pytest.raises(ValueError, match="does not fit the model: unknown layers.1"):
        new(**changes | {"layers": 1}).load(tmp_path)


def test_weights_with_the_published_names_are_opened(tmp_path):
    """With queries, keys and values as rows of one matrix, as earlier versions of this network had them, too."""
    network = new(text_layers=1)
    network.save(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".v." in name or ".v_linear." in name]:
        linear = "_linear" if "_linear" in name else ""
        parts = [name.replace(f".v{linear}.", f".{one}{linear}.") for one in ("kv" if linear else "qkv")]
        tensors[name.replace(f".v{linear}.", ".kv_linear." if linear else ".qkv.")] = torch.cat(
            [tensors.pop(part) for part in parts]
        )
    assert tensors["layers.0.attn.qkv.weight"].shape == (48, 16)
    assert tensors["layers.1.cross_attn.kv_linear.weight"].shape == (32, 16) and "y_pool.kv_linear.bias" in tensors
    save_file(tensors, file)
    assert (DiT.open(tmp_path).eval()(*inputs()) == network(*inputs())).all()


def test_widths_must_divide():
    with pytest.raises(ValueError, match=r"dit: width 18 must be a multiple of heads \(4\) and of 4"):
        DiT(**SIZES | {"width": 18, "heads": 4})


def test_blocks_are_all_transformer_blocks():
    network = new(text_layers=1)
    assert len(network.blocks()) == 3 == len(network.recomputed_blocks())
