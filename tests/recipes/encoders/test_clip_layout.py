"""OpenCLIP's text towers in the layout of transformers, and VAEs without a shift: the same values as before."""

import json

import pytest
import torch
from diffusers import AutoencoderKL
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import CLIPTextModel, CLIPTokenizer

from data.tokenizers.clip_library import open_clip
from recipes.encoders.base import weights_hash
from recipes.encoders.clip_layout import clip_tokenizer
from recipes.encoders.text import hf_clip_text, open_clip_text
from recipes.encoders.vae import kl_vae
from recipes.models.latent_diffusion.diffusers_pipeline import check_text

CAPTIONS = ["a red heart", "", "stop! don't?!? 12,5%", "many words " * 20]


@pytest.fixture
def variant(clip_folder, tmp_path):
    """(changes of the text tower's config) -> an open_clip folder with new weights."""

    def make(**text):
        torch.manual_seed(1)
        values = json.loads((clip_folder / "open_clip_config.json").read_text())
        quick = text.pop("quick_gelu", False)
        values["model_cfg"] |= {"quick_gelu": quick, "text_cfg": values["model_cfg"]["text_cfg"] | text}
        folder = tmp_path / "clip"
        folder.mkdir()
        (folder / "open_clip_config.json").write_text(json.dumps(values))
        clip = open_clip.CLIP(**values["model_cfg"])
        tensors = {name: torch.randn_like(tensor) * 0.3 for name, tensor in clip.state_dict().items()}
        save_file(tensors, folder / "open_clip_model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("layer", ["last", "penultimate"])
@pytest.mark.parametrize("text", [{}, {"quick_gelu": True}, {"mlp_ratio": 2.0, "layers": 1}], ids=str)
def test_a_tower_is_the_same_after_the_conversion(variant, tmp_path, layer, text):
    if layer == "penultimate" and text.get("layers") == 1:
        pytest.skip("no block is left")
    encoder = open_clip_text(path=str(variant(**text)), layer=layer, precision="fp32")
    model, tokenizer = encoder.for_transformers()
    model.save_pretrained(tmp_path / "text_encoder")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = CLIPTextModel.from_pretrained(tmp_path / "text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert model.config.num_hidden_layers == text.get("layers", 3) - (layer == "penultimate")
    tokens = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert torch.equal(tokens, encoder.tokenize(CAPTIONS))
    with torch.no_grad():
        found = model(tokens).last_hidden_state
    torch.testing.assert_close(found, encoder.encode(CAPTIONS), rtol=1e-4, atol=1e-4)
    # And it is an encoder of this repository again.
    again = hf_clip_text(path=str(tmp_path), subfolder="text_encoder", tokenizer="tokenizer", precision="fp32")
    torch.testing.assert_close(again.encode(CAPTIONS), encoder.encode(CAPTIONS), rtol=1e-4, atol=1e-4)
    model, tokenizer = again.for_transformers()
    assert torch.equal(model(tokens).last_hidden_state, found)


def test_a_tokenizer_with_other_tokens_is_not_written(variant):
    """The pipeline would draw other captions than those that it is given, without an error."""
    encoder = open_clip_text(path=str(variant()), precision="fp32")
    model, tokenizer = encoder.for_transformers()
    check_text(encoder, model, tokenizer)
    tokenizer.bpe_ranks = {}  # as without its merges
    tokenizer.cache = {}
    with pytest.raises(ValueError, match="transformers' tokenizer gives other tokens; use --layout native"):
        check_text(encoder, model, tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return clip_tokenizer(open_clip.get_tokenizer("ViT-B-32"), "ViT-B-32")


@settings(max_examples=300)
@given(caption=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="&<"), max_size=40))
def test_tokens_are_those_of_open_clip(tokenizer, caption):
    """Without HTML entities, which OpenCLIP replaces, and without marks such as <start_of_text>."""
    found = tokenizer(caption, padding="max_length", truncation=True).input_ids
    assert found == open_clip.tokenize([caption])[0].tolist()


def test_towers_that_transformers_does_not_have(variant):
    encoder = open_clip_text(path=str(variant(ls_init_value=0.1)), precision="fp32")
    with pytest.raises(ValueError, match="another architecture than transformers' CLIPTextModel"):
        encoder.for_transformers()
    encoder.module.attn_mask = None
    with pytest.raises(ValueError, match="attends to later tokens"):
        encoder.for_transformers()
    encoder.tokenize = lambda captions: None
    with pytest.raises(ValueError, match="is not CLIP's byte-pair one"):
        encoder.for_transformers()


@pytest.mark.parametrize("without", [(), ("quant_conv", "post_quant_conv"), ("post_quant_conv",)])
def test_a_vae_without_its_shift(vae_folder, tmp_path, without):
    """With 1 x 1 convolutions beside the latents, and without them as in Stable Diffusion 3 and FLUX."""
    vae = AutoencoderKL.from_pretrained(vae_folder, low_cpu_mem_usage=False)
    for name in without:
        setattr(vae, name, None)
        vae.register_to_config(**{f"use_{name}": False})
    vae.save_pretrained(tmp_path / "before")
    encoder = kl_vae(path=str(tmp_path / "before"), precision="fp32")
    assert encoder.shift_factor == 0.25
    encoder.for_diffusers().save_pretrained(tmp_path / "vae")
    vae = AutoencoderKL.from_pretrained(tmp_path / "vae", low_cpu_mem_usage=False)
    assert vae.config.shift_factor is None and vae.config.scaling_factor == 0.5
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    mean, std = encoder.encode(images)
    with torch.no_grad():
        posterior = vae.encode(images / 127.5 - 1).latent_dist
        torch.testing.assert_close(posterior.mean * 0.5, mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(posterior.std * 0.5, std, rtol=1e-4, atol=1e-5)
        decoded = (vae.decode(mean / 0.5).sample / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(decoded, encoder.decode(mean), rtol=1e-4, atol=1e-5)
    # The encoder itself has not changed.
    hash = kl_vae(path=str(tmp_path / "before"), precision="fp32").weights_hash
    assert weights_hash(encoder.module) == encoder.weights_hash == hash
