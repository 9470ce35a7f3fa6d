"""The JSON files of exports, which nobody should trust: networks are built of them, or refused in one line."""

import json
import math
from unittest.mock import Mock

import pytest
import torch
from diffusers import AutoencoderKL
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from recipes.encoders.open_clip_models import CONFIG, open_clip_tokenizer
from recipes.encoders.text import hf_clip_text, open_clip_text
from recipes.encoders.vae import kl_vae
from recipes.models import config_files
from recipes.models.autoregressive.task import Autoregressive, load_transformer
from recipes.models.config_files import LARGEST, build_from
from recipes.models.contrastive.task import ContrastiveText
from recipes.models.dvae.files import load_dvae, save_dvae
from recipes.models.dvae.network import DVAE
from recipes.models.language.task import Language, load_language
from recipes.models.latent_diffusion.ddpm import DDPM
from recipes.models.latent_diffusion.dit import DiT
from recipes.models.latent_diffusion.rectified_flow import RectifiedFlow
from recipes.models.latent_diffusion.unet import UNet, unet
from recipes.scoring.reranking import Reranker
from tests.fuzzing import changed_json, few, reads_or_refuses, values

SCHEDULER = "scheduler_config.json"


def of_unet(folder):
    unet(channels=[32, 32], attention=[False, True], heads=[1, 2], text_width=8, sample_size=8, blocks=1).save(folder)


def of_autoregressive(folder):
    sizes = {"text_positions": 4, "text_vocabulary": 9, "side": 3, "codes": 5, "kernel": 3}
    Autoregressive(layers=2, width=8, heads=2, **sizes).export(folder)


def of_language(folder):
    Language(layers=2, width=8, heads=2, positions=4, vocabulary=9).export(folder)


def of_vae(folder):
    AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8).save_pretrained(folder)


def of_contrastive(folder):
    sizes = {"context_length": 6, "picture_size": 16, "patch_size": 8, "picture_width": 32, "picture_layers": 1}
    ContrastiveText(width=2, layers=2, heads=1, embedding=4, **sizes).export(folder)


def of_clip_text(folder):
    config = CLIPTextConfig(
        vocab_size=9, hidden_size=4, intermediate_size=4, num_hidden_layers=2, num_attention_heads=1,
        max_position_embeddings=6, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    CLIPTextModel(config).save_pretrained(folder)
    words = ["a", "a</w>", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


# What is read -> (writes a good folder, reads it, the file in question).
READERS = {
    "unet": (of_unet, UNet.open, "config.json"),
    "dit": (lambda f: DiT(width=8, layers=2, heads=2, text_width=8).save(f), DiT.open, "config.json"),
    "autoregressive": (of_autoregressive, load_transformer, "transformer/config.json"),
    "language": (of_language, load_language, "transformer/config.json"),
    "dvae": (lambda f: save_dvae(DVAE(codes=8, hidden=4, blocks=1, initial=4), f), load_dvae, "config.json"),
    "vae": (of_vae, lambda f: kl_vae(path=str(f), precision="fp32"), "config.json"),
    "clip": (of_contrastive, lambda f: open_clip_text(path=str(f), precision="fp32"), CONFIG),
    "reranker": (of_contrastive, lambda f: Reranker(str(f), "cpu"), CONFIG),
    "clip text": (of_clip_text, lambda f: hf_clip_text(path=str(f), precision="fp32"), "config.json"),
    "clip words": (of_clip_text, lambda f: hf_clip_text(path=str(f), precision="fp32"), "vocab.json"),
    "ddpm": (lambda f: DDPM().save(f), DDPM.open, SCHEDULER),
    "rectified flow": (lambda f: RectifiedFlow().save(f), RectifiedFlow.open, SCHEDULER),
}
numbers = st.sampled_from([-1, 0, 3, LARGEST - 1, 2**31, 2**64, 1.5, math.inf])


@pytest.fixture(scope="module", params=READERS)
def good(request, tmp_path_factory):
    """(Reads a folder, the file in question with what it holds)."""
    write, read, name = READERS[request.param]
    folder = tmp_path_factory.mktemp("good")
    write(folder)
    read((folder / name).parent)
    return read, folder / name, json.loads((folder / name).read_text())


@few
@given(st.data())
def test_a_file_with_another_value(good, data):
    read, file, content = good
    changed = dict(content)
    if data.draw(st.booleans()):
        changed[data.draw(st.sampled_from(sorted(content)))] = data.draw(numbers)
    else:
        changed = data.draw(changed_json(content) | values)
    file.write_text(json.dumps(changed))
    reads_or_refuses(read, file.parent)
    file.write_bytes(data.draw(st.binary(max_size=20)))
    reads_or_refuses(read, file.parent)


def test_a_file_that_is_not_there(good):
    read, file, _ = good
    file.unlink()
    if read is load_dvae:  # the public release has none; its tensors show the sizes
        assert read(file.parent).sizes["codes"] == 8
        return
    with pytest.raises(FileNotFoundError, match=file.name):
        read(file.parent)


def test_networks_of_many_small_modules_are_not_built(tmp_path):
    """Not even on the meta device, where each module takes milliseconds."""
    built = []
    (tmp_path / "config.json").write_text(json.dumps({"layers": LARGEST - 1}))
    with pytest.raises(ValueError, match="a network that is larger than the weights beside it"):
        build_from(
            tmp_path / "config.json",
            lambda sizes: [built.append(torch.nn.Linear(1, 1)) for _ in range(sizes["layers"])],
            {f"w{i}": torch.ones(1) for i in range(10)},
        )
    assert len(built) < 600  # each has two parameters


def test_networks_larger_than_the_weights_are_not_built(tmp_path):
    file, weights = tmp_path / "config.json", {"w": torch.ones(3, 50_000)}
    built = []

    def build(sizes):
        for _ in range(sizes["layers"]):
            built.append(torch.nn.Linear(sizes["width"], 1000))
        return len(built)

    file.write_text(json.dumps({"layers": 1, "width": 1000}))
    assert build_from(file, build, weights) == 1
    for layers, width, message in (
        (5000, 1000, "a network that is larger than the weights beside it"),
        (1, 49_999, "a network that is larger than the weights beside it"),
        (1, 50_001, "50001 is more than any size of the weights beside it"),
        (-(2**40), 1, f"-{2**40} is more than any size"),
    ):
        built.clear()
        file.write_text(json.dumps({"layers": layers, "width": width}))
        with pytest.raises(ValueError, match=message):
            build_from(file, build, weights)
        assert len(built) <= 1
    assert torch.nn.Linear(5000, 1000).weight.numel() == 5_000_000  # outside there is no limit


@pytest.mark.parametrize("name", READERS)
def test_networks_of_any_size_are_built_of_their_weights(name, tmp_path, monkeypatch):
    # from_pretrained gives a module each of its parameters twice, and open_clip some of them to two modules.
    write, read, file = READERS[name]
    write(tmp_path)
    monkeypatch.setattr(config_files, "SPARE", 0)  # as for weights that are much larger than it
    read((tmp_path / file).parent)


@pytest.mark.parametrize(
    ("write", "read", "message"),
    [
        (of_vae, READERS["vae"][1], "lacks weights, such as"),
        (of_clip_text, READERS["clip text"][1], "lacks weights, such as"),
        (of_contrastive, READERS["clip"][1], "Missing key"),
        (of_unet, UNet.open, "does not fit the model: missing"),
    ],
)
def test_weights_that_are_missing_are_not_drawn(tmp_path, write, read, message):
    write(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[sorted(tensors)[3]]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def of_two_levels(folder):
    types = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, **types).save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "read", "changed"),
    [
        (of_two_levels, READERS["vae"][1], ('"down_block_types"', '"down_blo#k_types"')),  # whose default is one level
        (of_two_levels, READERS["vae"][1], ('"layers_per_block": 1', '"layers_per_block": 0')),
        (of_clip_text, READERS["clip text"][1], ('"num_hidden_layers": 2', '"num_hidden_layers": 0')),
    ],
)
def test_weights_without_layers_are_not_left_out(tmp_path, write, read, changed):
    """A changed bit in the config would make another encoder of the same weights."""
    write(tmp_path)
    read(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert changed[0] in text
    (tmp_path / "config.json").write_text(text.replace(*changed))
    with pytest.raises(ValueError, match="has weights that its config.json has no layers for, such as"):
        read(tmp_path)


def test_a_text_model_is_read_from_a_file_of_a_whole_clip(tmp_path):
    """And from one of an earlier version of transformers, which has the numbers of positions."""
    of_clip_text(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    others = {"logit_scale": torch.ones(1), "text_model.embeddings.position_ids": torch.arange(6)[None]}
    save_file(tensors | others, tmp_path / "model.safetensors", {"format": "pt"})
    READERS["clip text"][1](tmp_path)


@pytest.mark.parametrize("change", [{"num_labels": 10**9}, {"text_config": {"num_labels": 10**9}}])
def test_no_names_are_made_of_a_billion_labels(tmp_path, monkeypatch, change):
    """transformers did so for the tokenizer already, before any number was compared with the weights."""
    of_clip_text(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    monkeypatch.setattr(CLIPTextConfig, "__init__", Mock(side_effect=AssertionError("names are made")))
    with pytest.raises(ValueError, match="config.json: num_labels is 1000000000, of each of which a name would be"):
        hf_clip_text(path=str(tmp_path))


@pytest.mark.parametrize("options", [{"pad_token": None}, {"bos_token": None}, {"model_max_length": "77"}])
def test_a_tokenizer_that_encodes_no_caption(tmp_path, options):
    of_clip_text(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(ValueError, match=f"text_encoder.path: {tmp_path} cannot be loaded: "):
        hf_clip_text(path=str(tmp_path), precision="fp32").encode(["a"])


def test_lost_merges_are_told(tmp_path, capsys):
    """Of CLIP's own vocabulary: no line where all are there; captions become other tokens where the file was cut."""
    of_clip_text(tmp_path)
    config = CLIPTextConfig.from_pretrained(tmp_path, vocab_size=49408, bos_token_id=49406, eos_token_id=49407)
    CLIPTextModel(config).save_pretrained(tmp_path)
    words = open_clip_tokenizer("ViT-B-32")
    marks = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    (tmp_path / "vocab.json").write_text(json.dumps({marks.get(word, word): i for word, i in words.encoder.items()}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in words.bpe_ranks)]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n")
    whole = READERS["clip text"][1](tmp_path)
    assert not capsys.readouterr().out
    (tmp_path / "merges.txt").write_text("\n".join(lines[:-2]) + "\n")
    READERS["clip text"][1](tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{tmp_path}: no line of merges.txt makes 2 of the 49408 entries of vocab.json, such as" in line
    (tmp_path / "merges.txt").write_text("")
    cut = READERS["clip text"][1](tmp_path)
    assert not torch.equal(cut.tokenize(["dots"]), whole.tokenize(["dots"]))
    assert "makes 48894 of" in capsys.readouterr().out


def options(**values):
    return {"tokenizer_kwargs": values}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_cfg", {"hf_tokenizer_name": "x", **options(trust_remote_code=True)}, "trust_remote_code is not read"),
        ("text_cfg", {"hf_tokenizer_name": "x"}, "contains custom code"),
        ("text_cfg", options(bpe_path="/etc/passwd"), "tokenizer_kwargs.bpe_path is not read"),
        ("text_cfg", options(additional_special_tokens=["(a+)+"]), "additional_special_tokens is not read"),
        ("text_cfg", {"hf_model_name": "owner/model"}, "hf_model_name names a model of the hub"),
        ("vision_cfg", {"timm_model_name": "hf-hub:owner/model"}, "expected the name of one of timm's models"),
        ("preprocess_cfg", {"std": [0.5, 0.5, 0.0]}, "preprocess_cfg.std"),
    ],
)
def test_a_clip_folder_runs_no_code_and_fetches_nothing(tmp_path, part, change, message):
    of_contrastive(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (config if part in config else config["model_cfg"])[part] |= change
    (tmp_path / CONFIG).write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\nclass Evil: pass\n")
    named = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text("{}")
    for read in (READERS["reranker"][1], lambda folder: open_clip_tokenizer(f"local-dir:{folder}")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    assert not ran.exists()


@pytest.fixture
def clip_text_folder(tmp_path):
    folder = tmp_path / "clip_text"
    folder.mkdir()
    of_clip_text(folder)
    return folder


@pytest.mark.parametrize("options", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_is_read_from_its_own_folder(clip_text_folder, tmp_path, options):
    """transformers reads whatever file its options name, and an export would hold what is in it."""
    hf_clip_text(path=str(clip_text_folder))
    (tmp_path / "credentials").write_text("#\nkey hunter2\n")
    (clip_text_folder / options).write_text(json.dumps({"merges_file": str(tmp_path / "credentials")}))
    with pytest.raises(ValueError, match=f"{options}: merges_file names a file, which is read from the folder alone"):
        hf_clip_text(path=str(clip_text_folder))
    of_contrastive(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "x"
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / options).write_text(json.dumps({"vocab_file": str(tmp_path / "credentials")}))
    with pytest.raises(ValueError, match=f"{options}: vocab_file names a file"):
        open_clip_tokenizer(f"local-dir:{tmp_path}")


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_a_config_names_no_code_of_the_hub(clip_text_folder, monkeypatch, name):
    """The library `kernels`, where it is installed, fetches such a repository and runs it."""
    run = Mock(side_effect=AssertionError)
    monkeypatch.setattr("transformers.modeling_utils.load_and_register_kernel", run)
    config = json.loads((clip_text_folder / "config.json").read_text())
    (clip_text_folder / "config.json").write_text(json.dumps(config | {name: "sender/code"}))
    assert hf_clip_text(path=str(clip_text_folder)).module.config._attn_implementation == "sdpa"
    run.assert_not_called()
