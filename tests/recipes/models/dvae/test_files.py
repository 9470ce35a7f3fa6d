"""Files of a dVAE: exports, and the public layouts."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FlavaImageCodebook, FlavaImageCodebookConfig

from recipes.encoders.dvae import dvae
from recipes.models.dvae.files import load_dvae, load_dvae_into, save_dvae
from recipes.models.dvae.network import map_pixels
from tests.recipes.models.dvae.checkpoints import SIZES, pictures, public_layout, random_checkpoint, small

# --- an encoder alone ------------------------------------------------------------------------------------------------


@pytest.fixture
def encoder_tensors():
    return random_checkpoint(**SIZES)["encoder"]


@pytest.fixture
def whole(tmp_path):
    """A network of the same tensors, with a decoder."""
    for part, tensors in random_checkpoint(**SIZES).items():
        save_file(tensors, tmp_path / f"{part}.safetensors")
    return load_dvae(tmp_path)


def openmmlab(tensors, file):
    torch.save(tensors, file)


def openmmlab_nested(tensors, file):
    torch.save({"meta": {"epoch": 3}, "state_dict": tensors}, file)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("encoder.safetensors", save_file),
        ("encoder.pt", torch.save),
        ("dalle_encoder.pth", openmmlab),
        ("dalle_encoder.pth", openmmlab_nested),
    ],
)
def test_an_encoder_alone_makes_the_same_tokens(tmp_path, whole, encoder_tensors, name, save):
    folder = tmp_path / "alone"
    folder.mkdir()
    save(encoder_tensors, folder / name)
    network = load_dvae(folder)
    assert network.decoder is None and network.sizes == {**SIZES, "initial": None}
    assert torch.equal(network.logits(pictures()), whole.logits(pictures()))


def test_a_reconstruction_is_what_the_network_makes_of_its_most_likely_codes(tmp_path, whole):
    pixels = (255 * pictures()).to(torch.uint8).permute(0, 2, 3, 1)  # noise alone often has one code everywhere
    with torch.no_grad():
        codes = whole.logits(pixels.permute(0, 3, 1, 2).float() / 255).argmax(1)
        made = whole.decode(codes)
    assert made.shape == (2, 3, 16, 16) and len(codes.unique()) > 1
    torch.testing.assert_close(dvae(path=str(tmp_path)).reconstruct(pixels), made)


@pytest.mark.parametrize("safe", [True, False])
def test_the_codebook_of_flava_makes_the_tokens_that_it_makes_itself(tmp_path, safe):
    torch.manual_seed(2)
    theirs = FlavaImageCodebook(FlavaImageCodebookConfig(num_blocks_per_group=2, hidden_size=8, vocab_size=24)).eval()
    for name, parameter in theirs.named_parameters():  # new biases would be 0
        parameter.data.normal_(std=0.02 if name.endswith("bias") else 1.4 / parameter[0].numel() ** 0.5)
    theirs.save_pretrained(tmp_path, safe_serialization=safe)
    assert (tmp_path / ("model.safetensors" if safe else "pytorch_model.bin")).is_file()
    network = load_dvae(tmp_path)
    with torch.no_grad():
        tokens = theirs.get_codebook_indices(map_pixels(pictures()))
        torch.testing.assert_close(network.logits(pictures()), theirs(map_pixels(pictures())), rtol=1e-5, atol=1e-5)
    assert torch.equal(network.tokens(pictures()), tokens) and len(tokens.unique()) > 1


def test_an_encoder_alone_tokenises_and_says_that_it_cannot_decode(tmp_path, whole, encoder_tensors):
    torch.save(encoder_tensors, tmp_path / "encoder.pt")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    encoder = dvae(path=str(tmp_path))
    pixels = (pictures(side=16) * 255).byte().permute(0, 2, 3, 1)[:, None]  # (B, 1, R, R, 3)
    tokens = encoder.store(pixels).arrays["tokens"][:, 0].long()
    assert torch.equal(tokens, whole.tokens(pixels[:, 0].permute(0, 3, 1, 2) / 255).flatten(1))
    for call in (encoder.need_decoder, lambda: encoder.decode(tokens.view(2, 2, 2))):
        with pytest.raises(ValueError, match="holds the encoder of a dVAE alone"):
            call()
    with pytest.raises(FileNotFoundError, match="no decoder.safetensors and no decoder.pt of a dVAE"):
        load_dvae_into(small(), tmp_path)


def test_an_export_without_its_decoder(tmp_path):
    network = small()
    save_dvae(network, tmp_path)
    (tmp_path / "decoder.safetensors").unlink()
    again = load_dvae(tmp_path)
    assert again.decoder is None and torch.equal(again.tokens(pictures()), network.tokens(pictures()))


def test_a_decoder_that_was_not_converted_is_named(tmp_path, encoder_tensors):
    save_file(encoder_tensors, tmp_path / "encoder.safetensors")
    (tmp_path / "decoder.pkl").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="decoder.pkl is a pickled program: docs/dalle.md says how to convert"):
        load_dvae(tmp_path)


# --- exports and mistakes --------------------------------------------------------------------------------------------


def test_an_export_comes_back(tmp_path):
    network, x = small(), pictures()
    save_dvae(network.to(memory_format=torch.channels_last), tmp_path / "dvae")
    assert {f.name for f in (tmp_path / "dvae").iterdir()} == {
        "config.json", "encoder.safetensors", "decoder.safetensors",
    }  # fmt: skip
    state = torch.get_rng_state()
    again = load_dvae(tmp_path / "dvae")
    assert (torch.get_rng_state() == state).all()
    assert all((a == b).all() for a, b in zip(network.state_dict().values(), again.state_dict().values(), strict=True))
    assert (again.tokens(x) == network.tokens(x)).all()
    assert set(load_file(tmp_path / "dvae/encoder.safetensors")) == set(public_layout(**SIZES)["encoder"])


def test_what_is_no_dvae_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no encoder.safetensors .* no pytorch_model.bin of a dVAE$"):
        load_dvae(tmp_path)
    (tmp_path / "encoder.pkl").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="encoder.pkl is a pickled program: docs/dalle.md says how to convert"):
        load_dvae(tmp_path)
    (tmp_path / "encoder.pt").write_bytes(pickle.dumps(Program()))
    with pytest.raises(ValueError, match="encoder.pt: holds more than tensors; save its state_dict"):
        load_dvae(tmp_path)
    assert not Program.ran
    torch.save({"step": 3}, tmp_path / "encoder.pt")
    with pytest.raises(ValueError, match="encoder.pt: holds no tensors by name"):
        load_dvae(tmp_path)
    torch.save({"conv.weight": torch.zeros(2)}, tmp_path / "encoder.pt")
    torch.save({"conv.weight": torch.zeros(2)}, tmp_path / "decoder.pt")
    with pytest.raises(ValueError, match="the tensors are not those of a dVAE"):
        load_dvae(tmp_path)


class Program:
    """What unpickling would run."""

    ran = False

    def __reduce__(self):
        return setattr, (Program, "ran", True)


def test_tensors_must_fit_exactly(tmp_path):
    parts = random_checkpoint(**SIZES)
    for part, tensors in parts.items():
        save_file(tensors, tmp_path / f"{part}.safetensors")
    del parts["decoder"]["blocks.group_4.block_2.res_path.conv_3.b"]
    save_file(parts["decoder"], tmp_path / "decoder.safetensors")
    with pytest.raises(ValueError, match="decoder.safetensors does not fit the model: missing blocks.group_4.block_2"):
        load_dvae(tmp_path)
    for part, other in (("encoder", "decoder"), ("decoder", "encoder")):
        save_file(parts[part], tmp_path / f"{other}.safetensors")
    with pytest.raises(ValueError, match="encoder and decoder are swapped, or the images have 24 channels"):
        load_dvae(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: expected a JSON object .*line 1"),
        ("[1]", "config.json: expected a JSON object"),
        ('{"kind": "unet"}', 'config.json: is not that of a dVAE, whose "kind" is "dvae"'),
        (json.dumps({"kind": "dvae", **SIZES, "codes": "24"}), "config.json: expected whole numbers for codes"),
        (json.dumps({"kind": "dvae", **SIZES, "codes": 25}), "encoder.safetensors does not fit the model"),
    ],
)
def test_a_wrong_config(tmp_path, text, message):
    save_dvae(small(), tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_dvae(tmp_path)


