"""Transformers over tokens in recipes/generate.py."""

from argparse import BooleanOptionalAction
from pathlib import Path

from recipes.models.family import Family

FAMILY = Family(
    title="token",
    networks=("transformer",),
    guidance=1.0,
    options={
        "--temperature": {"type": float, "help": "divides the logits (default: 1)"},
        "--top-k": {"type": int, "help": "draw from the k most likely codes only (default: all)"},
        "--top-p": {
            "type": float,
            "help": "draw from the most likely codes with this probability in all (default: 1)",
        },
        "--picture": {"type": Path, "help": "image whose upper rows are kept and completed"},
        "--rows": {"type": int, "help": "rows of the token grid that are kept (default: 15 of 32)"},
        "--cuda-graph": {
            "action": BooleanOptionalAction,
            "help": "on a GPU, launch all kernels of a token together (default: yes)",
        },
    },
    pipeline="recipes.models.autoregressive.pipeline:load",
)
