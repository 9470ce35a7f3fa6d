"""Memory that the U-Net's forward pass keeps for the backward pass, per sample, computed on the meta device.

    python benchmarks/activations.py

Counts the tensors that autograd keeps in bf16 at full width, with the levers of the recipes: attention keeps query,
key, value and result, GEGLU and norms with SiLU their input. Everything else of the GPU's memory comes on top: weights,
gradients and moments (`--dry-run`), 16-bit copies of the weights, buffers of kernels, and fragments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor

from benchmarks.reporting import write_results
from recipes.algorithms.modules import fused_geglu
from recipes.algorithms.modules.fused_group_norm import fuse_group_norms
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.models.blocks.attention import AttentionOnViews
from recipes.models.blocks.lean import make_lean
from recipes.models.kernels.fused_norm import FusedGroupNorm
from recipes.models.latent_diffusion.unet import UNet


class Kept(torch.autograd.Function):
    """An operation that keeps its inputs, and its result if it is attention."""

    @staticmethod
    def forward(ctx: Any, width: int, keeps_result: bool, *inputs: Tensor) -> Tensor:
        y = inputs[0].new_empty((*inputs[0].shape[:-1], width))
        ctx.save_for_backward(*inputs, *([y] if keeps_result else []))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        """Nothing: only the forward pass is counted."""


def kept_bytes(denoiser: UNet, side: int, samples: int) -> int:
    """Bytes that the forward pass of a U-Net on the meta device keeps, without weights.

    Args:
        denoiser: with lean blocks.
        side: of the latents.
        samples: in the microbatch.
    """
    for module in denoiser.modules():
        if isinstance(module, Attention):
            module.set_processor(AttentionOnViews(lambda q, k, v: Kept.apply(q.shape[-1], True, q, k, v)))
    weights = {p.untyped_storage()._cdata for p in denoiser.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    like = {"device": "meta", "dtype": torch.bfloat16}
    latents = torch.empty(samples, denoiser.latent_channels, side, side, **like)
    text = torch.empty(samples, 77, denoiser.text_width, **like)
    geglu = patch.object(fused_geglu, "geglu", lambda x: Kept.apply(x.shape[-1] // 2, False, x))
    norm = patch.object(FusedGroupNorm, "forward", lambda self, x: Kept.apply(x.shape[-1], False, x))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), geglu, norm:
        denoiser(latents, torch.empty(samples, device="meta", dtype=torch.long), text)
    return sum(tensor.untyped_storage().nbytes() for name, tensor in kept.items() if name not in weights)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for name in ("sd2_base", "sd2_base_512"):
        recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [], Recipe, missing=[])
        task = build_on_meta(recipe.model).to(torch.bfloat16)
        make_lean(task)
        fused_geglu.fuse_gates(task)
        fuse_group_norms(task, measured=False)
        side = recipe.data.args["resolution"] // 8
        one, two = (kept_bytes(task.denoiser, side, samples) for samples in (1, 2))
        row = {"recipe": name, "MB per sample": round((two - one) / 1e6)}
        rows.append(row | {f"GB at {m}": round((two - one) * m / 1e9, 1) for m in (16, 32, 64, 128)})
    write_results("activations", "sd2", rows, __doc__.split("\n\n")[2])


if __name__ == "__main__":
    main()
