"""Encoders against the libraries they wrap."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizerFast, T5Config, T5EncoderModel

from data.tokenizers.clip_library import open_clip
from recipes.config.build import encoders_of
from recipes.encoders.base import weights_hash
from recipes.encoders.dvae import dvae
from recipes.encoders.text import hf_clip_text, open_clip_text
from recipes.encoders.vae import kl_vae
from recipes.exports.encoder_files import encoder_files

CAPTIONS = ["a red heart", "", "woman firefighter: dark skin tone", "many words " * 20]


@pytest.fixture(scope="module")
def clip(clip_folder):
    """The whole open_clip model."""
    return open_clip.create_model(f"local-dir:{clip_folder}").eval()


@pytest.fixture(scope="module")
def hf_folder(clip, tmp_path_factory):
    """The same text tower as a transformers model, with a tokenizer of single bytes."""
    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=16, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=12, hidden_act="gelu", projection_dim=16,
    )  # fmt: skip
    model = CLIPTextModel(config)
    old, new = clip.state_dict(), {}
    new["embeddings.token_embedding.weight"] = old["token_embedding.weight"]
    new["embeddings.position_embedding.weight"] = old["positional_embedding"]
    for i in range(3):
        source, target = f"transformer.resblocks.{i}.", f"encoder.layers.{i}."
        for kind in ("weight", "bias"):
            split = old[f"{source}attn.in_proj_{kind}"].chunk(3)
            for name, part in zip("qkv", split, strict=True):
                new[f"{target}self_attn.{name}_proj.{kind}"] = part
            for theirs, ours in (
                ("attn.out_proj", "self_attn.out_proj"), ("ln_1", "layer_norm1"), ("ln_2", "layer_norm2"),
                ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2"),
            ):  # fmt: skip
                new[f"{target}{ours}.{kind}"] = old[f"{source}{theirs}.{kind}"]
    for kind in ("weight", "bias"):
        new[f"final_layer_norm.{kind}"] = old[f"ln_final.{kind}"]
    model.text_model.load_state_dict(new)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder / "text_encoder")
    (folder / "tokenizer").mkdir()
    letters = [chr(n) for n in range(33, 127)]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocabulary)}))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    return folder


def test_vae_with_scale_and_shift(vae_folder):
    encoder = kl_vae(path=str(vae_folder), precision="fp32")
    assert (encoder.channels, encoder.downsample) == (4, 2)
    assert (encoder.scaling_factor, encoder.shift_factor) == (0.5, 0.25)
    images = torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8)
    mean, std = encoder.encode(images)
    assert mean.shape == std.shape == (3, 4, 8, 12) and mean.dtype == std.dtype == torch.float32
    vae = AutoencoderKL.from_pretrained(vae_folder)
    with torch.no_grad():
        posterior = vae.encode(images.float() / 127.5 - 1).latent_dist
        decoded = vae.decode(posterior.mean).sample
    torch.testing.assert_close(mean, (posterior.mean - 0.25) * 0.5)
    torch.testing.assert_close(std, posterior.std * 0.5)
    torch.testing.assert_close(encoder.decode(mean), (decoded / 2 + 0.5).clamp(0, 1))
    stored = encoder.encode(images[..., :16])[0].half().float()
    assert torch.equal(encoder.reconstruct(images[..., :16].permute(0, 2, 3, 1)), encoder.decode(stored))


def test_vae_options_change_no_value(vae_folder):
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    one = kl_vae(path=str(vae_folder), precision="fp32").encode(images)
    for options in ({"channels_last": False, "slicing": True}, {"fused": False}):
        other = kl_vae(path=str(vae_folder), precision="fp32", **options).encode(images)
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def test_a_fused_vae_decodes_the_same_and_keeps_its_weights(vae_folder):
    latents = torch.randn(2, 4, 8, 12)
    fused, plain = (kl_vae(path=str(vae_folder), precision="fp32", fused=fused) for fused in (True, False))
    torch.testing.assert_close(fused.decode(latents), plain.decode(latents), atol=1e-5, rtol=1e-5)
    assert fused.weights_hash == plain.weights_hash
    kinds = [type(module).__name__ for module in fused.module.modules()]
    assert kinds.count("FusedGroupNorm") == sum(isinstance(m, torch.nn.GroupNorm) for m in plain.module.modules())
    assert "LeanResnetBlock" in kinds and "ResnetBlock2D" not in kinds


def test_a_compiled_vae_encodes_the_same(vae_folder, monkeypatch):
    """Without code generation, which takes long on a CPU."""
    compilations = []

    def compile(function, **options):
        compilations.append(options)
        return torch._dynamo.optimize("aot_eager", dynamic=options["dynamic"])(function)

    monkeypatch.setattr(torch, "compile", compile)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    one = kl_vae(path=str(vae_folder), precision="fp32", compiled=True).encode(images)
    assert compilations == [{"dynamic": False}]
    other = kl_vae(path=str(vae_folder), precision="fp32").encode(images)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fused_vae_on_a_gpu(vae_folder, compiled):
    """Half precision: a few roundings of 2^-11 of numbers of about 1."""
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, device="cuda")
    plain = kl_vae(path=str(vae_folder), fused=False).to("cuda").encode(images)
    fused = kl_vae(path=str(vae_folder), compiled=compiled).to("cuda").encode(images)
    for left, right in zip(fused, plain, strict=True):
        torch.testing.assert_close(left, right, atol=1e-2, rtol=1e-2)


def test_precision_is_that_of_the_device(vae_folder, capsys):
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    exact = kl_vae(path=str(vae_folder), precision="fp32").encode(images)
    half = kl_vae(path=str(vae_folder)).to("cpu")
    assert half.precision == "fp32" and "fp32 instead of fp16" in capsys.readouterr().out
    bf16 = kl_vae(path=str(vae_folder), precision="bf16").to("cpu")
    assert bf16.precision == "bf16" and next(bf16.module.parameters()).dtype == torch.bfloat16
    rough, again = bf16.encode(images), bf16.encode(images, exact=True)
    assert 0 < (rough[0] - exact[0]).abs().max() < 0.1
    torch.testing.assert_close(again, exact)
    assert half.weights_hash == bf16.weights_hash  # of the weights as stored
    # Parked on the CPU between uses on a GPU, an fp16 encoder is used in fp32 there, with its weights as stored.
    half.module.half()
    half.precision = "fp16"
    torch.testing.assert_close(half.encode(images), exact)


def test_images_that_overflow_in_16_bits_are_decoded_in_fp32(vae_folder, monkeypatch):
    latents = torch.randn(4, 4, 4, 4, generator=torch.Generator().manual_seed(5))
    exact, half = (kl_vae(path=str(vae_folder), precision=name).to("cpu") for name in ("fp32", "bf16"))
    known, plain, decode = exact.decode(latents), half.decode(latents), half.module.decode

    def overflows(raw):
        found = decode(raw)
        found.sample[1, 0, 0, 0], found.sample[2, 0, 0, 0] = float("nan"), float("-inf")
        return found

    monkeypatch.setattr(half.module, "decode", overflows)
    found = half.decode(latents)
    torch.testing.assert_close(found[1:3], known[1:3], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[::3], plain[::3]) and not torch.equal(plain[1:3], known[1:3])


def test_tokens_that_overflow_in_16_bits_are_decoded_in_fp32(dvae_folder, monkeypatch):
    exact, half = (dvae(path=str(dvae_folder), precision=name).to("cpu") for name in ("fp32", "bf16"))
    tokens = torch.randint(exact.codes, (3, 4, 4), generator=torch.Generator().manual_seed(5))
    known, plain, decode = exact.decode(tokens), half.decode(tokens), half.module.decode

    def overflows(tokens):
        found = decode(tokens)
        found[1, 0, 0, 0] = float("nan")
        return found

    monkeypatch.setattr(half.module, "decode", overflows)
    found = half.decode(tokens)
    torch.testing.assert_close(found[1], known[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[::2], plain[::2]) and not torch.equal(plain[1], known[1])


def test_captions_that_overflow_in_16_bits_are_encoded_in_fp32(clip_folder, monkeypatch):
    captions = ["a cat", "two dogs", "three birds"]
    exact, half = (open_clip_text(path=str(clip_folder), precision=name).to("cpu") for name in ("fp32", "bf16"))
    known, plain, encode = exact.encode(captions), half.encode(captions), half.encode_tokens

    def overflows(tokens, exact=False):
        found = encode(tokens, exact)
        if not exact:
            found[1, 0, 0] = float("inf")
        return found

    monkeypatch.setattr(half, "encode_tokens", overflows)
    found = half.encode(captions)
    torch.testing.assert_close(found[1], known[1])
    assert torch.equal(found[::2], plain[::2]) and not torch.equal(plain[1], known[1])


def test_hash_knows_names_and_values():
    layer = torch.nn.Linear(3, 2)
    first = weights_hash(layer)
    assert first == weights_hash(layer) and len(first) == 64
    with torch.no_grad():
        layer.bias[1] += 1e-3
    assert weights_hash(layer) != first
    assert weights_hash(torch.nn.Sequential(layer)) != weights_hash(layer)


def test_a_vae_of_another_normalisation_is_refused(vae_folder, tmp_path):
    config = json.loads((vae_folder / "config.json").read_text()) | {"latents_mean": [0.0] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "diffusion_pytorch_model.safetensors").symlink_to(vae_folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match="latents_mean"):
        kl_vae(path=str(tmp_path))


@pytest.mark.parametrize("factor", [{"scaling_factor": None}, {"scaling_factor": 0}, {"shift_factor": [0.5]}])
def test_a_vae_without_a_scale_is_refused(vae_folder, tmp_path, factor):
    config = json.loads((vae_folder / "config.json").read_text()) | factor
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "diffusion_pytorch_model.safetensors").symlink_to(vae_folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match="has scaling_factor .* and shift_factor .*; give a number other than 0"):
        kl_vae(path=str(tmp_path))


def test_a_vae_of_another_class_is_refused(tmp_path):
    """FLUX.2's: diffusers would open it as an AutoencoderKL, without the layer that normalises its latents."""
    blocks = {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    sizes = {"block_out_channels": [8], "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    AutoencoderKLFlux2(**blocks, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has the class AutoencoderKLFlux2; name an AutoencoderKL"):
        kl_vae(path=str(tmp_path))


def test_only_safetensors_are_read(vae_folder, clip_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((vae_folder / "config.json").read_bytes())
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(FileNotFoundError, match="diffusion_pytorch_model.safetensors"):
        kl_vae(path=str(tmp_path))
    (tmp_path / "open_clip_config.json").write_bytes((clip_folder / "open_clip_config.json").read_bytes())
    (tmp_path / "open_clip_pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(FileNotFoundError, match="open_clip_model.safetensors"):
        open_clip_text(path=str(tmp_path))
    with pytest.raises(ValueError, match="nor a tag of ViT-H-14; tags: .*laion2b_s32b_b79k"):
        open_clip_text(pretrained=str(tmp_path / "open_clip_pytorch_model.bin"))


def test_names_that_open_clip_does_not_know(clip_folder):
    with pytest.raises(ValueError, match="did you mean ViT-H-14"):
        open_clip_text(model="ViT-H14", pretrained="laion2b_s32b_b79k")
    with pytest.raises(ValueError, match="random weights"):
        open_clip_text(model="ViT-H-14")
    with pytest.raises(ValueError, match="give null"):
        open_clip_text(path=str(clip_folder), pretrained="openai")


def test_open_clip_last_layer_is_the_plain_forward(clip, clip_folder):
    encoder = open_clip_text(path=str(clip_folder), layer="last", precision="fp32")
    tokens = encoder.tokenize(CAPTIONS)
    text = encoder.encode(CAPTIONS)
    assert text.shape == (4, 12, 16) and text.dtype == torch.float32
    assert (encoder.length, encoder.width) == (12, 16)
    with torch.no_grad():
        projected = clip.encode_text(tokens)
    ends = text[torch.arange(4), tokens.argmax(1)]  # the end token's vector is what CLIP projects
    torch.testing.assert_close(ends @ clip.text_projection.detach(), projected, atol=1e-5, rtol=1e-5)
    assert not any("visual" in name or "projection" in name for name in encoder.module.state_dict())


@pytest.mark.parametrize("layer", ["penultimate", "last"])
def test_open_clip_equals_transformers(clip_folder, hf_folder, layer):
    encoder = open_clip_text(path=str(clip_folder), layer=layer, precision="fp32")
    model = CLIPTextModel.from_pretrained(hf_folder / "text_encoder").eval()
    tokens = encoder.tokenize(CAPTIONS)
    with torch.no_grad():
        output = model(input_ids=tokens, output_hidden_states=True)
        hidden = output.hidden_states[-2 if layer == "penultimate" else -1]
        expected = model.text_model.final_layer_norm(hidden)
    torch.testing.assert_close(encoder.encode(CAPTIONS), expected, atol=1e-5, rtol=1e-5)
    ours = hf_clip_text(
        path=str(hf_folder), subfolder="text_encoder", tokenizer="tokenizer", layer=layer, precision="fp32"
    )
    torch.testing.assert_close(ours.encode_tokens(tokens), expected, atol=1e-5, rtol=1e-5)


def test_hf_tokens_are_padded_and_cut(hf_folder):
    encoder = hf_clip_text(path=str(hf_folder), subfolder="text_encoder", tokenizer="tokenizer", precision="fp32")
    tokens = encoder.tokenize(["ab c", "", "word " * 20])
    start, end = 188, 189
    assert tokens.shape == (3, 12) and tokens.dtype == torch.int64
    assert tokens[:, 0].tolist() == [start] * 3 and tokens[2, -1] == end and tokens[1, 1:].eq(end).all()
    assert encoder.encode(["ab c"]).shape == (1, 12, 16)
    with pytest.raises(FileNotFoundError, match="vocab.json"):
        hf_clip_text(path=str(hf_folder), subfolder="text_encoder", precision="fp32")


def cached_folder(monkeypatch, cache):
    """The folder of the repository me/model in a cache of the hub, which is all that can be reached of it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(cache))
    repository = cache / "models--me--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


def test_models_in_the_cache_of_the_hub(hf_folder, vae_folder, tmp_path, monkeypatch):
    """They are those of the folders that they are copies of, and one that is not whole is said to be so."""
    folder = cached_folder(monkeypatch, tmp_path)
    shutil.copytree(hf_folder, folder)
    shutil.copytree(vae_folder, folder / "vae")
    parts = {"subfolder": "text_encoder", "tokenizer": "tokenizer", "precision": "fp32"}
    text, own_text = (hf_clip_text(path=path, **parts) for path in ("me/model", str(hf_folder)))
    assert text.tokenizer_id == own_text.tokenizer_id and torch.equal(text.encode(CAPTIONS), own_text.encode(CAPTIONS))
    vae = kl_vae(path="me/model", subfolder="vae", precision="fp32")
    assert vae.weights_hash == kl_vae(path=str(vae_folder), precision="fp32").weights_hash
    (folder / "text_encoder" / "model.safetensors").write_bytes(b"half of a header")
    with pytest.raises(ValueError, match="text_encoder.path: me/model .*: its weights are not whole .*download it ag"):
        hf_clip_text(path="me/model", **parts)
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps(config | {"latent_channels": 3}))
    with pytest.raises(ValueError, match="image_encoder.path: me/model .* cannot be loaded: .*size mismatch"):
        kl_vae(path="me/model", subfolder="vae", precision="fp32")
    for wrong, reason in (({"act_fn": 3}, "AttributeError"), ({"act_fn": "x"}, "x not found")):
        (folder / "vae" / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=f"image_encoder.path: me/model .* cannot be loaded: .*{reason}"):
            kl_vae(path="me/model", subfolder="vae", precision="fp32")
    shutil.copytree(hf_folder, folder, dirs_exist_ok=True)
    config = json.loads((hf_folder / "text_encoder" / "config.json").read_text())
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    with pytest.raises(ValueError, match="text_encoder.path: me/model .* cannot be loaded: "):
        hf_clip_text(path="me/model", **parts)


def test_a_text_model_that_transformers_5_wrote(hf_folder, tmp_path, monkeypatch):
    """Its tensors have no prefix, and its tokenizer is one file: in a folder, and in the cache of the hub."""
    folder = cached_folder(monkeypatch, tmp_path)
    (folder / "text_encoder").mkdir(parents=True)
    shutil.copyfile(hf_folder / "text_encoder" / "config.json", folder / "text_encoder" / "config.json")
    tensors = load_file(hf_folder / "text_encoder" / "model.safetensors")
    tensors = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "text_encoder" / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer").mkdir()
    words = hf_folder / "tokenizer"
    fast = CLIPTokenizerFast(str(words / "vocab.json"), str(words / "merges.txt"))
    fast.backend_tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<|startoftext|>"} | dict.fromkeys(["eos_token", "pad_token", "unk_token"], "<|endoftext|>")
    config = {"backend": "tokenizers", "model_max_length": 12, "tokenizer_class": "CLIPTokenizer"} | names
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    parts = {"subfolder": "text_encoder", "tokenizer": "tokenizer", "precision": "fp32"}
    old, new, of_hub = (hf_clip_text(path=str(path), **parts) for path in (hf_folder, folder, "me/model"))
    captions = ["ab c", "", "word " * 20, "Hi! it's 3!3"]
    for encoder in (new, of_hub):
        assert torch.equal(encoder.tokenize(captions), old.tokenize(captions))
        assert torch.equal(encoder.encode(captions), old.encode(captions))
        assert encoder.lost_tokens(captions) == old.lost_tokens(captions)
    model, tokenizer = new.for_transformers()
    tokenizer.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "vocab.json").is_file()
    assert torch.equal(model(old.tokenize(captions)).last_hidden_state, old.encode(captions))


def test_a_text_model_of_another_type_is_refused(hf_folder, tmp_path):
    """It is not said to be damaged."""
    words = hf_folder / "tokenizer"
    fast = CLIPTokenizerFast(str(words / "vocab.json"), str(words / "merges.txt"))
    fast.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=200)
    T5EncoderModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"path: {tmp_path} is a model of the type t5; name a CLIP text model"):
        hf_clip_text(path=str(tmp_path))


def test_tokens_that_are_cut_are_counted(clip_folder, hf_folder):
    """Of letters by the tokenizer of `hf_folder`. Two of the 12 positions are for the marks."""
    captions = ["", "a" * 10, "a" * 11, "ab" * 20]
    letters = hf_clip_text(path=str(hf_folder), subfolder="text_encoder", tokenizer="tokenizer", precision="fp32")
    assert letters.lost_tokens(captions) == [0, 0, 1, 30]
    words = open_clip_text(path=str(clip_folder), precision="fp32")
    assert words.lost_tokens(["", "dot " * 10, "dot " * 13]) == [0, 0, 3]


def test_open_clip_weights_in_a_file_of_their_own(clip_folder, tmp_path, monkeypatch):
    config = json.loads((clip_folder / "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / "tiny-for-tests.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    monkeypatch.setenv("HOME", str(clip_folder))
    apart = open_clip_text(model="tiny-for-tests", pretrained="~/open_clip_model.safetensors", precision="fp32")
    together = open_clip_text(model=f"local-dir:{clip_folder}", precision="fp32")
    assert apart.weights_hash == together.weights_hash
    torch.testing.assert_close(apart.encode(CAPTIONS), together.encode(CAPTIONS))


@pytest.mark.parametrize(
    "kind",
    [
        "vae", "vae in a pipeline", "hf", "hf, absolute words", "hf, words beside", "open_clip", "open_clip model",
        "open_clip file",
    ],
)  # fmt: skip
def test_an_export_has_all_that_an_encoder_reads(vae_folder, hf_folder, clip_folder, tmp_path, kind):
    """What is copied opens on a machine where the places that the manifest names do not exist."""
    here, moved, words = tmp_path / "here", tmp_path / "moved", tmp_path / "words"
    shutil.copytree(vae_folder if kind == "vae" else clip_folder if "open" in kind else hf_folder, here)
    shutil.copytree(vae_folder, here / "vae", dirs_exist_ok=True)
    shutil.copytree(hf_folder / "tokenizer", words)
    (words / "key").touch()  # a manifest of somebody else may name a folder with other files
    text = {"name": "hf_clip_text", "path": str(here), "subfolder": "text_encoder"}
    config = json.loads((clip_folder / "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / "tiny-of-exports.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "tiny-of-exports.json")
    file = str(here / "open_clip_model.safetensors")
    values = {
        "vae": {"name": "kl_vae", "path": str(here)},
        "vae in a pipeline": {"name": "kl_vae", "path": str(here), "subfolder": "vae"},
        "hf": text | {"tokenizer": "tokenizer"},
        "hf, absolute words": text | {"tokenizer": str(words)},
        "hf, words beside": text | {"tokenizer": "../words"},
        "open_clip": {"name": "open_clip_text", "path": str(here)},
        "open_clip model": {"name": "open_clip_text", "model": f"local-dir:{here}"},
        "open_clip file": {"name": "open_clip_text", "model": "tiny-of-exports", "pretrained": file},
    }[kind]
    build = {"kl_vae": kl_vae, "hf_clip_text": hf_clip_text, "open_clip_text": open_clip_text}[values["name"]]
    options = {key: value for key, value in values.items() if key != "name"}
    record = {"component": values, "weights_hash": build(**options).weights_hash}
    group = "image_encoder" if "vae" in kind else "text_encoder"
    manifest = SimpleNamespace(**{"image_encoder": None, "text_encoder": None, group: record})
    for source, place in encoder_files(manifest):
        (moved / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, moved / place)
    shutil.rmtree(here)
    shutil.rmtree(words)
    assert any(encoders_of(manifest, moved))
    copied = {path.name for path in moved.rglob("*")}
    assert not copied & ({"key", "vae"} if kind.startswith("hf") else {"key"})


def test_a_tokenizer_with_more_words_than_the_model(clip_folder, tmp_path):
    config = json.loads((clip_folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["vocab_size"] = 1000
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    weights = load_file(clip_folder / "open_clip_model.safetensors")
    weights["token_embedding.weight"] = weights["token_embedding.weight"][:1000].clone()
    save_file(weights, tmp_path / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match="embeds 1000 tokens, its tokenizer has 49408"):
        open_clip_text(path=str(tmp_path))


def test_results_do_not_depend_on_the_batch(vae_folder, clip_folder):
    """In fp32, to the last few bits: batches of other sizes may add in another order."""
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    vae = kl_vae(path=str(vae_folder), precision="fp32")
    one_by_one = torch.cat([vae.encode(image[None])[0] for image in images])
    torch.testing.assert_close(vae.encode(images)[0], one_by_one, atol=1e-5, rtol=1e-5)
    text = open_clip_text(path=str(clip_folder), precision="fp32")
    one_by_one = torch.cat([text.encode([caption]) for caption in CAPTIONS])
    torch.testing.assert_close(text.encode(CAPTIONS), one_by_one, atol=1e-5, rtol=1e-5)
    assert np.isfinite(one_by_one.numpy()).all()


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (lambda: kl_vae(path="data/vae", subfolder="vae"), "data/vae is no folder in .*, and as a hub id it"),
        (
            lambda: hf_clip_text(path="data/text", subfolder="text_encoder", tokenizer="tokenizer"),
            "data/text is no folder in .*, and as a hub id it",
        ),
        (lambda: open_clip_text(model="ViT-B-32", pretrained="laion2b_s34b_b79k"), "ViT-B-32/laion2b_s34b_b79k"),
    ],
)
def test_a_hub_that_cannot_be_reached(load, name, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=f"{name} cannot be loaded: this machine cannot reach the hub and has no copy"):
        load()


@pytest.mark.parametrize(
    ("load", "opens"),
    [
        (open_clip_text, "open_clip.get_tokenizer"),
        (hf_clip_text, "transformers.CLIPTokenizer.from_pretrained"),
    ],
)
def test_a_lack_of_memory_is_not_a_broken_tokenizer(load, opens, clip_folder, hf_folder, monkeypatch):
    monkeypatch.setattr(opens, Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        if load is open_clip_text:
            load(path=str(clip_folder), precision="fp32")
        else:
            load(path=str(hf_folder), subfolder="text_encoder", tokenizer="tokenizer", precision="fp32")
