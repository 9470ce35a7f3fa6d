"""OpenCLIP's text tower and tokenizer in the layout of transformers: the same vectors and tokens.

The two differ in names, in how attention's projections are stored (one matrix, or three), and in the tokenizer's files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from data.system.errors import one_line
from data.tokenizers.clip_library import open_clip

# OpenCLIP pads with token 0, which is also the letter "!" inside of words. It gets a second name for padding, because
# transformers would take each "!" of a caption for padding otherwise.
PAD = "<|pad|>"
SPECIAL = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
BLOCK_NAMES = {
    r"attn\.out_proj": "self_attn.out_proj",
    r"ln_1": "layer_norm1",
    r"ln_2": "layer_norm2",
    r"mlp\.c_fc": "mlp.fc1",
    r"mlp\.c_proj": "mlp.fc2",
}


def clip_text_model(tower: nn.Module, id: str, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """The tower with the same weights and the same output as transformers' module, on the CPU in fp32.

    Args:
        tower: a `recipes.encoders.text.Tower`, with the blocks that are used and the final layer norm.
        id: name of the model, for messages.
        tokenizer: of `clip_tokenizer`.

    Raises:
        ValueError: parts that transformers' CLIP does not have.
    """
    if not len(tower.blocks) or not all(
        type(block) is open_clip.transformer.ResidualAttentionBlock for block in tower.blocks
    ):
        raise ValueError(f"text_encoder: {id} has other blocks than CLIP's, which transformers' CLIPTextModel lacks")
    if tower.attn_mask is None:
        raise ValueError(f"text_encoder: {id} attends to later tokens too, which transformers' CLIPTextModel does not")
    first = tower.blocks[0]
    length, width = tower.positional_embedding.shape
    config = CLIPTextConfig(
        vocab_size=tower.token_embedding.num_embeddings,
        hidden_size=width,
        intermediate_size=first.mlp.c_fc.out_features,
        projection_dim=width,
        num_hidden_layers=len(tower.blocks),
        num_attention_heads=first.attn.num_heads,
        max_position_embeddings=length,
        hidden_act=_activation(first.mlp.gelu, id),
        layer_norm_eps=tower.ln_final.eps,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModel(config).eval().requires_grad_(False)
    try:
        model.load_state_dict(renamed(tower.state_dict()))
    except RuntimeError as error:
        problem = f"text_encoder: {id} has another architecture than transformers' CLIPTextModel"
        raise ValueError(f"{problem}: {one_line(error)}") from None
    return model


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tower's tensors under transformers' names, the projections of attention apart: (3D, D) as three (D, D)."""
    found = {}
    for name, tensor in tensors.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(\w+)", name)
        projection = re.fullmatch(r"blocks\.(\d+)\.attn\.in_proj_(weight|bias)", name)
        if projection:
            prefix = f"text_model.encoder.layers.{projection[1]}.self_attn"
            for letter, part in zip("qkv", tensor.float().chunk(3), strict=True):
                found[f"{prefix}.{letter}_proj.{projection[2]}"] = part.contiguous()
        elif block:
            inner = next((new for old, new in BLOCK_NAMES.items() if re.fullmatch(old, block[2])), block[2])
            found[f"text_model.encoder.layers.{block[1]}.{inner}.{block[3]}"] = tensor.float()
        elif name.startswith("ln_final."):
            found["text_model.final_layer_norm." + name.removeprefix("ln_final.")] = tensor.float()
        elif name == "token_embedding.weight":
            found["text_model.embeddings.token_embedding.weight"] = tensor.float()
        elif name == "positional_embedding":
            found["text_model.embeddings.position_embedding.weight"] = tensor.float()
        else:
            found[name] = tensor
    return found


def _activation(module: nn.Module, id: str) -> str:
    if isinstance(module, open_clip.transformer.QuickGELU):
        return "quick_gelu"
    if isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu_pytorch_tanh"
    raise ValueError(f"text_encoder: {id} has the activation {type(module).__name__}, which is not converted")


def clip_tokenizer(tokenize: Any, id: str) -> CLIPTokenizer:
    """OpenCLIP's byte-pair tokenizer as transformers' `CLIPTokenizer`.

    Tokens are the same where ftfy is installed, except that OpenCLIP also replaces HTML entities (`&amp;`).

    Args:
        tokenize: OpenCLIP's.
        id: name of the model, for messages.

    Raises:
        ValueError: a tokenizer of another kind.
    """
    if type(tokenize) is not open_clip.SimpleTokenizer or tokenize.reduction_fn is not None:
        raise ValueError(f"text_encoder: the tokenizer of {id} ({type(tokenize).__name__}) is not CLIP's byte-pair one")
    vocabulary = {SPECIAL.get(token, token): number for token, number in tokenize.encoder.items()} | {PAD: 0}
    merges = sorted(tokenize.bpe_ranks, key=tokenize.bpe_ranks.get)
    with TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        lines = ["#version: 0.2", *(" ".join(merge) for merge in merges), ""]
        (Path(folder) / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
        return CLIPTokenizer(
            f"{folder}/vocab.json", f"{folder}/merges.txt", pad_token=PAD, model_max_length=tokenize.context_length
        )
