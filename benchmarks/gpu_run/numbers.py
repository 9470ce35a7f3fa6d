"""Losses and gradients of every model family on the GPU, compared with those on the CPU in 32 bits.

The models are those of the OpenMoji recipes, with the same weights, batch and random numbers. `fp32`: TF32 is off, and
only the order of sums differs. `bf16`: under autocast, as recipes train on a GPU. `fused norms`: bf16 with the levers
channels_last, low_precision_norms and fused_group_norm; without a GPU, PyTorch computes these norms.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_run.context import Context
from recipes.algorithms.modules.fused_group_norm import fuse_group_norms
from recipes.algorithms.modules.low_precision_norms import lower_norms
from recipes.config.build import build
from recipes.config.recipe import Recipe, load_config
from recipes.models.task import Task

ROOT = Path(__file__).resolve().parents[2]
TABLE = "GPU numbers compared with the CPU's"
# Family -> its recipe, with changes.
RECIPES: dict[str, tuple[str, list[str]]] = {
    "latent_diffusion": ("openmoji_diffusion", []),
    "unet": ("openmoji_unet", []),
    "autoregressive": ("openmoji_dalle", ["model.text_positions=64"]),  # 128 positions, so that FlexAttention computes
    "language": ("docs_gpt2", ["model.dropout=0"]),  # a GPU draws what is dropped in a kernel of its own
    "kl_autoencoder": ("openmoji_vae", []),
    "dvae": ("openmoji_dvae", []),
    "contrastive_text": ("openmoji_text", []),
}
FUSED = ("unet", "kl_autoencoder")  # families with GroupNorms of diffusers
SAMPLES = 4
# Norm of the difference, relative to the norm of all gradients. Sums of thousands of products in another order change
# 32-bit numbers by 1e-6 to 1e-5; bf16 rounds every factor by up to 2^-9, and the roundings of many layers add up.
TOLERANCES = {"fp32": 1e-3, "bf16": 0.1, "fused norms": 0.1}
# The gradient of an absolute difference is a sign, and rounding flips those of small differences.
SIGNS = {"fp32": 0.02, "bf16": 0.6, "fused norms": 0.6}


class SameDraws(TorchDispatchMode):
    """Random numbers are drawn on the CPU, by one generator, and moved to the device that asked for them."""

    DRAWS = {"aten::randn", "aten::rand", "aten::randint", "aten::randn_like", "aten::rand_like"}
    IN_PLACE = {"aten::normal_", "aten::uniform_", "aten::exponential_", "aten::random_"}

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func._schema.name
        if name not in self.DRAWS | self.IN_PLACE:
            return func(*args, **kwargs)
        self.drawn += 1
        if name in self.IN_PLACE:
            return args[0].copy_(func(torch.empty(args[0].shape), *args[1:], generator=self.generator))
        if name.endswith("_like"):
            like, draw = args[0], {"aten::randn_like": torch.randn, "aten::rand_like": torch.rand}[name]
            dtype = kwargs.get("dtype") or like.dtype
            return torch.empty_like(like, dtype=dtype).copy_(draw(like.shape, dtype=dtype, generator=self.generator))
        *bounds, shape = args  # of integers: an upper bound, or both
        options = {"dtype": kwargs.get("dtype"), "generator": self.generator}
        if name == "aten::randint":
            low, high = [0, *bounds][-2:]
            drawn = torch.randint(low, high, tuple(shape), **{**options, "dtype": options["dtype"] or torch.int64})
        else:
            drawn = {"aten::randn": torch.randn, "aten::rand": torch.rand}[name](tuple(shape), **options)
        return drawn.to(kwargs.get("device"))


def batch_for(task: Task, samples: int = SAMPLES, side: int = 64) -> dict[str, Tensor]:
    """A random batch that a task takes, on the CPU.

    Args:
        samples: in the batch.
        side: of images in pixels, where the task takes any.
    """
    draw, need = torch.Generator().manual_seed(1), task.requirements()
    if "vocabulary" in need:
        return {"tokens": torch.randint(need["vocabulary"], (samples, need["positions"] + 1), generator=draw)}
    if "codes" in need and "text_positions" in need:
        return {
            "text": torch.randint(need["text_vocabulary"], (samples, need["text_positions"]), generator=draw),
            "image": torch.randint(need["codes"], (samples, need["side"] ** 2), generator=draw),
        }
    if "text_width" in need:
        return {
            "latents": torch.randn(samples, need["channels"], 16, 16, generator=draw),
            "text": torch.randn(samples, 77, need["text_width"], generator=draw),
        }
    side = need.get("picture_size", side)
    batch = {"image": torch.randint(256, (samples, 3, side, side), generator=draw, dtype=torch.uint8)}
    if "context_length" in need:
        batch["tokens"] = torch.randint(1, 40_000, (samples, need["context_length"]), generator=draw)
    return batch


def gradients(task: Task, batch: dict[str, Tensor], device: torch.device, autocast: bool) -> tuple[float, Tensor]:
    """The loss, and all gradients as one vector of 64 bits on the CPU."""
    task = task.to(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    # FlexAttention cannot be traced under a dispatch mode, and its family draws no random numbers.
    draws = contextlib.nullcontext() if "text_positions" in task.requirements() else SameDraws(2)
    with draws, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss = task(batch)["total"]
    loss.backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in task.parameters() if p.requires_grad]
    return loss.item(), torch.cat([gradient.detach().flatten().double().cpu() for gradient in found])


def with_fused_norms(task: Task) -> Task:
    """The levers of Stable Diffusion 2's recipe for norms, without measuring whether they are faster."""
    task = task.to(memory_format=torch.channels_last)
    lower_norms(task)
    fuse_group_norms(task, measured=False)
    return task


def ways(family: str) -> dict[str, tuple[Callable[[Task], Task], bool]]:
    """Name -> (change of the model, whether autocast is on)."""
    found: dict[str, tuple[Callable[[Task], Task], bool]] = {"fp32": (lambda task: task, False)}
    found["bf16"] = (lambda task: task, True)
    if family in FUSED:
        found["fused norms"] = (with_fused_norms, True)
    return found


def compare(context: Context, *, family: str) -> None:
    """Rows of one model family.

    Raises:
        ArithmeticError: a difference is beyond its tolerance.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    name, changes = RECIPES[family]
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", changes, Recipe, [])
    torch.manual_seed(0)
    task = build(recipe.model)
    vary(task)
    batch = batch_for(task)
    expected_loss, expected = gradients(copy.deepcopy(task), batch, torch.device("cpu"), autocast=False)
    wrong = []
    for way, (change, autocast) in ways(family).items():
        loss, found = gradients(change(copy.deepcopy(task)), batch, context.device, autocast)
        off = relative(found, expected)
        loss_off = abs(loss - expected_loss) / abs(expected_loss)
        tolerance = SIGNS.get(way, TOLERANCES[way]) if family == "kl_autoencoder" else TOLERANCES[way]
        passed = off <= tolerance and loss_off <= TOLERANCES[way]  # false for NaN
        values: dict[str, Any] = {
            "family": family,
            "way": way,
            "loss, CPU": round(expected_loss, 6),
            "loss": round(loss, 6),
            "relative difference": f"{loss_off:.1e}",
            "gradients' relative difference": f"{off:.1e}",
            "tolerance": tolerance,
            "result": "passed" if passed else "FAILED",
        }
        context.records.row(TABLE, values)
        if not passed:
            wrong.append(way)
    context.records.note(TABLE, " ".join(__doc__.split("\n\n")[1].split()))
    if wrong:
        raise ArithmeticError(f"{family}: beyond the tolerance: {', '.join(wrong)}")


@torch.no_grad()
def vary(task: nn.Module) -> None:
    """Add small random numbers to all weights: those that begin at 0 would hide the gradients before them."""
    draw = torch.Generator().manual_seed(3)
    for parameter in task.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()
