"""What a pass on the meta device keeps, compared with what PyTorch keeps under bf16 autocast."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from recipes.algorithms.modules.low_precision_norms import lower_norms
from recipes.config.build import build, build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.models.autocast import for_products, without_autocast
from recipes.planning.batches import blank_batch, traced_model
from recipes.planning.tracing.autocast import TOLD, MetaAutocast
from recipes.planning.tracing.gpu_kernels import GpuKernels
from recipes.planning.tracing.trace import trace

ROOT = Path(__file__).resolve().parents[4]
SAMPLES = 5
TOKENS = "layers: 3, width: 96, heads: 3, text_positions: 16, text_vocabulary: 300, side: 8, codes: 70"
TEXTS = "layers: 3, width: 96, heads: 3, positions: 64, vocabulary: 300, dropout: 0.0"
UNET = "channels: [32, 32], attention: [true, false], heads: [1, 1]"
# Family -> recipe, changes.
MODELS = {
    "autoregressive": ("dalle_1b", [f"model={{{TOKENS}}}"]),
    "language": ("gpt2_1b", [f"model={{{TEXTS}}}"]),
    "dit": ("openmoji_diffusion", []),
    "unet": ("sd2_base", [f"model.denoiser={{{UNET}}}", "data.resolution=64"]),
}
# Bytes that only a CPU keeps: a 16-bit mask of attention for each of three layers, 80 x 80 positions. And one number
# per sample is 32-bit there, while inputs are 16-bit in a plan.
ONLY_CPU = {"autoregressive": 3 * 2 * 80 * 80 + 2 * SAMPLES}
# Bytes that only a plan has: mean and deviation of each row of a layer norm of 16-bit values are 32-bit on a GPU and
# 16-bit on a CPU. There are 15 norms over 64 positions and 3 over 16.
ONLY_PLAN = {"unet": 2 * 2 * SAMPLES * (15 * 64 + 3 * 16)}


def kept_by(model, batch, *modes):
    """Bytes that autograd keeps of a forward pass in modes, without weights and their 16-bit copies."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    shapes = {tuple(sorted(p.shape)) for p in model.parameters()}  # no activation here has one of these
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in weights and tuple(sorted(tensor.shape)) not in shapes:
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with ExitStack() as stack:
        for mode in (*modes, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)):
            stack.enter_context(mode)
        model(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", MODELS)
def test_what_is_kept_is_what_pytorch_keeps(family):
    """To the byte: planning with less would run out of memory, with more would leave a part of it empty."""
    name, changes = MODELS[family]
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", changes, Recipe, [])
    task = build_on_meta(traced_model(recipe)).to(torch.bfloat16)
    blank = blank_batch(recipe, task, SAMPLES)
    trace(task, blank)  # a first call makes masks
    low = {n: x.bfloat16() if x.is_floating_point() else x for n, x in blank.items()}
    planned = kept_by(task, low, GpuKernels(lambda *_: None), MetaAutocast())

    model = build(traced_model(recipe))
    if "low_precision_norms" in recipe.algorithms:
        lower_norms(model)
    draw = {True: torch.randn_like, False: torch.ones_like}
    batch = {n: draw[x.is_floating_point()](x, device="cpu") for n, x in blank.items()}
    model({n: x.clone() for n, x in batch.items()})  # here, too
    kept = kept_by(model, batch, torch.autocast("cpu", torch.bfloat16))
    assert planned - ONLY_PLAN.get(family, 0) == kept - ONLY_CPU.get(family, 0)


def test_products_are_16_bit_and_sums_are_not():
    with torch.device("meta"):
        linear, norm, x = nn.Linear(8, 8), nn.LayerNorm(8), torch.empty(2, 4, 8)
    with MetaAutocast():
        y = linear(norm(x))
        attended = F.scaled_dot_product_attention(query=x, key=x, value=x)
        assert torch.is_autocast_enabled("meta") and torch.get_autocast_dtype("meta") == torch.bfloat16
        found = y.dtype, (x @ x.mT).dtype, attended.dtype, torch.einsum("bij,bkj->bik", [x, x]).dtype
        assert found == (torch.bfloat16,) * 4
        assert norm(x).dtype == (x + y).dtype == torch.float32
        y.float().sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_a_model_can_turn_it_off():
    x = torch.empty(4, 4, device="meta")
    with MetaAutocast():
        with torch.autocast("meta", enabled=False):
            assert (x @ x).dtype == torch.float32 and not torch.is_autocast_enabled("meta")
            with torch.autocast("meta", dtype=torch.bfloat16):
                assert (x @ x).dtype == torch.bfloat16
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_a_part_that_goes_without_it_is_planned_in_32_bits():
    x = torch.empty(4, 4, device="meta")
    with MetaAutocast():
        assert for_products(x).dtype == torch.bfloat16
        with without_autocast(x.device):
            assert (x @ x).dtype == for_products(x).dtype == torch.float32
    with without_autocast(x.device):  # PyTorch has no autocast for the meta device
        assert (x @ x).dtype == for_products(x).dtype == torch.float32


def test_other_devices_and_what_comes_after_are_left_alone():
    before = [getattr(place, name) for place, name in TOLD]
    x = torch.ones(4, 4)
    with pytest.raises(ZeroDivisionError), MetaAutocast():
        assert (x @ x).dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16 and torch.get_autocast_dtype("cpu") == torch.bfloat16
        raise ZeroDivisionError
    assert [getattr(place, name) for place, name in TOLD] == before
    with pytest.raises(RuntimeError, match="autocast"):
        torch.is_autocast_enabled("meta")
