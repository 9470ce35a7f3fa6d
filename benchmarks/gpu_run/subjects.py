"""The recipes whose training is measured, and the settings in which each is.

Without torch, so that the command line can name the steps before the slow imports.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config.components import COMPONENTS
from recipes.config.recipe import Recipe, load_config, to_yaml

ROOT = Path(__file__).resolve().parents[2]
CALLBACKS = ("progress", "throughput", "lr_monitor", "memory_monitor")  # what is kept of a recipe's: others need data
GAIN = 1.02  # a change must be this much faster to be among those that pay: each setting runs once, and clocks vary
SHIPPED, START, BEST = "as shipped", "starting point", "all that pay"


@dataclass(frozen=True)
class Subject:
    """A recipe that is measured.

    Attributes:
        table: name of its table.
        yaml: its file in yamls/.
        data: the data component that takes the place of its own.
        batch: samples per step.
        start: changes of the setting that others are compared with: a guess of what one GPU needs. Without any, the
            starting point is the recipe as shipped.
        changes: changes on top of `start`, by name. Those that touch the same key exclude each other.
        small: changes to tiny sizes.
        unit: of the rate.
        per_sample: units per sample.
    """

    table: str
    yaml: str
    data: str
    batch: int
    start: tuple[str, ...]
    changes: dict[str, tuple[str, ...]]
    small: tuple[str, ...]
    unit: str = "images/s"
    per_sample: int = 1


DATA = {
    "random_latents": "benchmarks.common.random_latents:random_latents",
    "random_tokens": "benchmarks.common.random_tokens:random_tokens",
}
COMPILED = {
    "compiled": ("algorithms.compile={name: compile}",),
    "compiled, its CUDA graphs": ("algorithms.compile={name: compile, mode: reduce-overhead}",),
}
GRAPHS = ("algorithms.graphs={name: cuda_graphs}",)
LIGHTNING = ("training.engine=lightning",)
RECOMPUTED = {"recomputed": ("algorithms.activation_checkpointing={name: activation_checkpointing}",)}
SMALL_UNET = (
    "model.denoiser={channels: [32, 64], attention: [true, false], heads: [1, 2], blocks: 1}",
    "model.denoiser={text_width: 16, norm_groups: 8}",
    "data={name: random_latents, resolution: 64}",
    "training.global_batch=4",
)
SMALL_DECODER = (
    "model={layers: 2, width: 64, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "training.global_batch=4",
    "algorithms.compile=null",  # it takes a CPU minutes
)
# Words of two changes that no run has both of: graphs need weights that keep their addresses, and are captured once.
APART = (
    ("training.fsdp={", "mode: reduce-overhead"),
    ("training.fsdp={", "name: cuda_graphs"),
    ("mode: reduce-overhead", "name: cuda_graphs"),
)
# Averages that begin at the end of a run, or that fewer batches are measured than they are apart.
NO_AVERAGE = "algorithms.scheduled_ema=null"
UNET = ("training.fsdp=null", "training.microbatch=128")
SUBJECTS = {
    "unet_256": Subject(
        "U-Net at 256",
        "sd2_base.yaml",
        "data={name: random_latents, resolution: 256}",
        256,
        UNET,
        {
            "FSDP": ("training.fsdp={strategy: SHARD_GRAD_OP, wrap: blocks}",),
            "microbatches of 64": ("training.microbatch=64",),
            "microbatches of 256": ("training.microbatch=256",),
            "attention without cuDNN": ("algorithms.attention={name: attention, implementation: flash}",),
            "fused norms of all shapes": ("algorithms.fused_group_norm={name: fused_group_norm, when: always}",),
            **COMPILED,
            "CUDA graphs": GRAPHS,
        },
        SMALL_UNET,
    ),
    "unet_256_of_128": Subject(  # what each of 128 GPUs has of the recipe's batch
        "U-Net at 256, 16 images per GPU",
        "sd2_base.yaml",
        "data={name: random_latents, resolution: 256}",
        16,
        ("training.fsdp=null", "training.microbatch=16"),
        {
            "Lightning": LIGHTNING,
            **COMPILED,
            "CUDA graphs": GRAPHS,
            "CUDA graphs, Lightning": (*GRAPHS, *LIGHTNING),
            "CUDA graphs, compiled": (*GRAPHS, *COMPILED["compiled"]),
        },
        SMALL_UNET,
    ),
    "unet_512": Subject(
        "U-Net at 512",
        "sd2_base_512.yaml",
        "data={name: random_latents, resolution: 512}",
        64,
        ("training.fsdp=null", "training.microbatch=32", NO_AVERAGE),
        {
            "microbatches of 64": ("training.microbatch=64",),
            "compiled": COMPILED["compiled"],
        },
        SMALL_UNET,
    ),
    "transformer": Subject(
        "transformer",
        "dalle_1b.yaml",
        "data={name: random_tokens, samples: 64000}",
        64,
        (NO_AVERAGE,),
        {
            "attention with a dense mask": ("model.attention=masked",),
            "fp8": ("algorithms.fp8={name: fp8}",),
            "averaged every 3 batches": (
                "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.99, every: 3, device: cpu}",
            ),
            "compiled": COMPILED["compiled"],
            **RECOMPUTED,
            "microbatches of 32": ("training.microbatch=32",),  # more than 80 GB, by the planner
        },
        SMALL_DECODER,
        "tokens/s",
        1280,
    ),
}


def register_data() -> None:
    """Add the data components of benchmarks to those of this process."""
    COMPONENTS["data"].update(DATA)


def recipe_for(subject: Subject, changes: list[str], small: bool, folder: Path) -> Recipe:
    """The shipped recipe on random data, without validation, checkpoints, loggers and what draws samples."""
    register_data()
    keys = [subject.data, f"training.global_batch={subject.batch}", "training.duration=1000000ba"]
    keys += ["evals.val=null", "training.eval_every=null", f"output={folder}/run", *changes]
    keys += ["checkpoints={save: false, every: null, autoresume: false, load_weights: null}"]
    if small:
        keys += [*subject.small, "training.microbatch=2", "training.fsdp=null", "training.precision=auto"]
        keys += ["algorithms.low_precision_norms=null"]
    recipe = load_config(ROOT / "yamls" / subject.yaml, keys, Recipe, [])
    recipe.callbacks = {name: one for name, one in recipe.callbacks.items() if name in CALLBACKS}
    recipe.loggers = {}
    return recipe


def single_changes(subject: Subject, small: bool) -> dict[str, tuple[str, ...]]:
    """The subject's changes, and the removal of each lever that its starting point has; without those that change
    nothing, and the one that is the recipe as shipped."""
    return {name: changes for name, (changes, _) in settings(subject, small).items()}


def settings(subject: Subject, small: bool) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Name -> the changes of `single_changes`, and whether the model is then compiled, be it by the recipe's own
    lever."""
    with tempfile.TemporaryDirectory() as folder:
        start = recipe_for(subject, list(subject.start), small, Path(folder))
        changes = {f"without {label}": (f"algorithms.{label}=null",) for label in start.algorithms}
        changes |= subject.changes
        known, found = {to_yaml(start), to_yaml(recipe_for(subject, [], small, Path(folder)))}, {}
        for name, change in changes.items():
            recipe = recipe_for(subject, [*subject.start, *change], small, Path(folder))
            if to_yaml(recipe) not in known:
                found[name] = change, any(lever.name == "compile" for lever in recipe.algorithms.values())
        return found


def shipped_change(subject: Subject, small: bool) -> list[str]:
    """The one of the subject's changes that makes the starting point the recipe as shipped; [] if none does.

    It is measured as the recipe as shipped, and pays if that is faster than the starting point.
    """
    with tempfile.TemporaryDirectory() as folder:
        shipped, start, *changed = (
            to_yaml(recipe_for(subject, changes, small, Path(folder)))
            for changes in ([], [*subject.start], *([*subject.start, *change] for change in subject.changes.values()))
        )
    if shipped == start:
        return []
    found = (list(one) for one, text in zip(subject.changes.values(), changed, strict=True) if text == shipped)
    return next(found, [])


def why_not_compared(rows: list[dict[str, Any]], unit: str) -> str | None:
    """What has not been measured, without which it is not known which changes pay; None if nothing is missing.

    Args:
        rows: of a subject's table.
        unit: of its rates.
    """
    measured = {row["setting"] for row in rows if isinstance(row["values"].get(unit), int | float)}
    if START not in measured:
        return "no starting point"
    if not any(row["change"] for row in rows if row["setting"] in measured):
        return "no single change"
    return None


def all_that_pay(rows: list[dict[str, Any]], unit: str) -> list[str]:
    """The changes of those rows that are faster than the starting point; of several of one key, or of two that exclude
    each other, the fastest's."""
    rates = {row["setting"]: row["values"].get(unit) for row in rows}
    start = rates.get(START)
    if not isinstance(start, int | float):
        return []
    faster = [row for row in rows if row["change"] and isinstance(row["values"].get(unit), int | float)]
    faster = sorted((row for row in faster if row["values"][unit] >= GAIN * start), key=lambda r: -r["values"][unit])
    kept: dict[str, str] = {}
    for row in faster:
        keys = [change.split("=", 1)[0] for change in row["change"]]
        together = "\n".join([*kept.values(), *row["change"]])
        if not any(key in kept for key in keys) and not any(a in together and b in together for a, b in APART):
            kept |= dict(zip(keys, row["change"], strict=True))
    return list(kept.values())
