"""The dVAE against a reading of the published architecture that shares nothing with it but the names of the tensors."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from recipes.models.dvae.files import load_dvae
from recipes.models.dvae.network import DVAE, map_pixels, unmap_pixels
from tests.recipes.models.dvae.checkpoints import SIZES, pictures, public_layout, random_checkpoint, small


def convolve(x, tensors, name):
    w = tensors[f"{name}.w"]
    return F.conv2d(x, w, tensors[f"{name}.b"], padding=w.shape[2] // 2)


def run(x, tensors, blocks, between):
    x = convolve(x, tensors, "blocks.input")
    for group in range(1, 5):
        for block in range(1, blocks + 1):
            name = f"blocks.group_{group}.block_{block}"
            inner = x
            for number in range(1, 5):
                inner = convolve(inner.relu(), tensors, f"{name}.res_path.conv_{number}")
            outer = convolve(x, tensors, f"{name}.id_path") if f"{name}.id_path.w" in tensors else x
            x = outer + inner / (4 * blocks) ** 2
        x = between(x) if group < 4 else x
    return convolve(x.relu(), tensors, "blocks.output.conv")


@pytest.fixture(params=["safetensors", "pt"])
def release(request, tmp_path):
    """A folder in the public layout at a small size, in either kind of file, and its tensors."""
    parts = random_checkpoint(**SIZES)
    for part, tensors in parts.items():
        file = tmp_path / f"{part}.{request.param}"
        save_file(tensors, file) if request.param == "safetensors" else torch.save(tensors, file)
    return tmp_path, parts


def test_a_checkpoint_of_the_public_layout_loads_and_computes_what_it_should(release):
    folder, parts = release
    network = load_dvae(folder)
    assert network.sizes == SIZES and not network.training
    x = pictures()
    with torch.no_grad():
        expected = run(0.8 * x + 0.1, parts["encoder"], 2, lambda maps: F.max_pool2d(maps, 2))
        torch.testing.assert_close(network.logits(x), expected, rtol=1e-5, atol=1e-5)
        tokens = network.tokens(x)
        assert tokens.dtype == torch.int64 and (tokens == expected.argmax(1)).all() and len(tokens.unique()) > 1
        one_hot = F.one_hot(tokens, 24).permute(0, 3, 1, 2).float()
        stats = run(one_hot, parts["decoder"], 2, lambda m: m.repeat_interleave(2, 2).repeat_interleave(2, 3))
        mean, log_scale = network.statistics(one_hot)
        torch.testing.assert_close(mean, stats[:, :3], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(log_scale, stats[:, 3:], rtol=1e-5, atol=1e-5)
        made = ((torch.sigmoid(stats[:, :3]) - 0.1) / 0.8).clamp(0, 1)
        torch.testing.assert_close(network.decode(tokens), made, rtol=1e-5, atol=1e-5)


def test_the_published_sizes():
    with torch.device("meta"):
        network = DVAE()
        pixels = torch.empty(2, 3, 256, 256)
    layout = public_layout(codes=8192, hidden=256, blocks=2, initial=128)
    for part, shapes in layout.items():
        assert {name: tuple(t.shape) for name, t in getattr(network, part).state_dict().items()} == shapes
    # The public files are of 215 and 175 MB.
    assert sum(math.prod(shape) for shape in layout["encoder"].values()) == 53_786_240
    assert sum(math.prod(shape) for shape in layout["decoder"].values()) == 43_829_766
    logits = network.logits(pixels)
    assert logits.shape == (2, 8192, 32, 32) and logits.dtype == torch.float32
    assert network.decode(logits.argmax(1)).shape == (2, 3, 256, 256)
    assert len(network.blocks()) == 16


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_new_weights():
    network = DVAE(codes=64, hidden=64, blocks=1, initial=32)
    for name, tensor in network.named_parameters():
        if name.endswith(".b"):
            assert (tensor == 0).all()
        elif tensor.numel() > 4000:
            deviations = tensor.std() * math.sqrt(tensor[0].numel())
            assert abs(deviations - 1) < 5 / math.sqrt(2 * tensor.numel())  # five standard errors
    assert len({module.gain for module in network.blocks()}) == 1 and network.blocks()[0].gain == 1 / 16


def test_numbers_of_codes_are_one_hot_vectors():
    network = small()
    tokens = torch.randint(24, (2, 3, 2), generator=torch.Generator().manual_seed(1))
    one_hot = F.one_hot(tokens, 24).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(network.decoder(tokens), network.decoder(one_hot), rtol=1e-6, atol=1e-6)
    for kind in (tokens, one_hot):
        network.zero_grad()
        network.decoder(kind).square().sum().backward()
        grad = network.decoder.blocks.input.w.grad
        assert (grad[:, ~torch.isin(torch.arange(24), tokens)] == 0).all() and (grad != 0).any()


def test_convolutions_around_the_relaxation_stay_in_32_bit():
    network, x = small(), pictures()
    seen = {}
    for name, module in network.named_modules():
        if name.endswith(("input", "conv", "conv_2")):
            module.register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: out.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        logits = network.logits(x)
        network.statistics(logits.softmax(1))
    full = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert full == {"encoder.blocks.output.conv", "decoder.blocks.input"} and len(seen) > 10
    # A network that was cast to 16-bit computes too, and its logits are added up in 32-bit.
    half = small().bfloat16()
    assert half.logits(x).dtype == half.decode(half.tokens(x)).dtype == torch.float32
    torch.testing.assert_close(half.logits(x), network.logits(x), rtol=0, atol=0.05)


def test_pixels_come_back():
    pixels = torch.linspace(0, 1, 256)
    mapped = map_pixels(pixels)
    torch.testing.assert_close(mapped[[0, -1]], torch.tensor([0.1, 0.9]))
    torch.testing.assert_close(unmap_pixels(mapped), pixels)
    assert unmap_pixels(torch.tensor([0.0, 1.0])).tolist() == [0, 1]


@pytest.mark.parametrize("wrong", [{"codes": 1}, {"hidden": 6}, {"blocks": 0}, {"initial": 0}])
def test_sizes_that_make_no_network(wrong):
    with pytest.raises(ValueError, match="dvae: codes .* multiple of 4"):
        small(**wrong)


def test_sides_are_multiples_of_8():
    with pytest.raises(ValueError, match="images of 20 x 20 pixels: give sides that are multiples of 8"):
        small().logits(pictures(side=20))
    for image in (pictures(side=24)[..., :20], pictures(side=24)[..., :20, :]):
        with pytest.raises(ValueError, match="multiples of 8"):
            small().logits(image)
