"""What levers change of the memory that a plan counts."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.planning.batches import blank_batch, traced_model
from recipes.planning.tracing.autocast import MetaAutocast
from recipes.planning.tracing.levers import apply_levers
from recipes.planning.tracing.pass_memory import follow

ROOT = Path(__file__).resolve().parents[4]
UNET = "model.denoiser={channels: [32, 32], attention: [true, false], heads: [1, 1]}"
TOKENS = "model={layers: 4, width: 64, heads: 2, text_positions: 64, text_vocabulary: 300, side: 8, codes: 64}"
SAMPLES = 16


def peak(name, *changes):
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [*changes], Recipe, [])
    task = build_on_meta(traced_model(recipe))
    apply_levers(recipe, task)
    task.to(torch.bfloat16)
    batch = blank_batch(recipe, task, SAMPLES)
    follow(task, batch)
    return max(interval.highest for interval in follow(task, batch))


def test_levers_of_the_unet():
    """Each adds what a run without it keeps: a plan that left that out would run out of memory."""
    own = [UNET, "data.resolution=64"]
    fused = peak("sd2_base", *own, "algorithms.fused_group_norm.when=always")
    shipped = peak("sd2_base", *own)  # auto, which may keep the norms as they are
    assert fused < shipped < peak("sd2_base", *own, "algorithms.fused_geglu=null")
    contiguous = peak("sd2_base", *own, "algorithms.channels_last=null")
    assert contiguous < shipped  # PyTorch's norm on a GPU copies what is in channels_last
    assert 1.1 * shipped < peak("sd2_base", *own, "algorithms.low_precision_norms=null")
    half = peak("sd2_base", *own, "algorithms.low_precision_norms.group_norm=false")
    assert shipped < half < peak("sd2_base", *own, "algorithms.low_precision_norms=null")


def test_column_layers_keep_a_second_copy_of_their_result():
    positions, width = 64 + 64, 64
    masked, columns = peak("dalle_1b", TOKENS, "model.attention=masked"), peak("dalle_1b", TOKENS)
    assert columns - masked == SAMPLES * positions * width * 2  # one of four layers is one


def test_norms_are_32_bit_as_on_a_gpu():
    with torch.device("meta"):
        norm, x = nn.LayerNorm(8).bfloat16(), torch.empty(2, 4, 8, dtype=torch.bfloat16)
    with MetaAutocast(wide_norms=True):
        assert norm(x).dtype == F.group_norm(x, 2).dtype == torch.float32
        with torch.autocast("meta", enabled=False):
            assert norm(x).dtype == torch.bfloat16
    with MetaAutocast():
        assert norm(x).dtype == torch.bfloat16
