"""Run by test_fp8.py in a process that takes the stub for a GPU: compiles a block of dalle_1b with 8-bit products."""

from pathlib import Path

import torch
import torch._inductor.config
from torch import nn

from recipes.algorithms.modules.fp8 import Fp8Linear
from recipes.config.build import build
from recipes.config.recipe import Recipe, load_config

ROOT = Path(__file__).resolve().parents[4]
FEW = ["model.layers=1", "model.codes=64", "model.text_vocabulary=300"]


def main():
    # Of each kernel one version: the compiler would compile several of many, to time them on the GPU.
    torch._inductor.config.triton.autotune_pointwise = False
    recipe = load_config(ROOT / "yamls" / "dalle_1b.yaml", FEW, Recipe, [])
    with torch.device("cuda"):
        task = build(recipe.model).train()
        text, image = (torch.zeros(16, length, dtype=torch.long) for length in (256, 1024))
    for block in task.blocks():
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear
        block.compile()
    with torch.autocast("cuda", torch.bfloat16):
        loss = task({"text": text, "image": image})["total"]
    loss.backward()
    print("gradients:", sum(p.grad is not None for p in task.parameters()), "of", len(list(task.parameters())))


if __name__ == "__main__":
    main()
