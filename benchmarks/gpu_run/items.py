"""The steps of `benchmarks/gpu.py`, in the order of their worth: what a run of half the time should have is first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_run.subjects import SUBJECTS, settings

# `numbers.RECIPES` says which model each is.
FAMILIES = ("unet", "autoregressive", "latent_diffusion", "language", "kl_autoencoder", "dvae", "contrastive_text")


@dataclass(frozen=True)
class Item:
    """A step.

    Attributes:
        name: for the command line and the tables.
        work: "module:function" in `benchmarks.gpu_run`, called with a Context and `arguments`.
        limit: seconds after which it is ended.
        arguments: keyword arguments.
    """

    name: str
    work: str
    limit: float
    arguments: dict[str, Any] = field(default_factory=dict)


def items(small: bool) -> list[Item]:
    """All steps in their order.

    Args:
        small: at tiny sizes, without what takes a CPU minutes.
    """
    found = [Item("machine", "device:machine", 120)]
    # FlexAttention compiles a kernel for each mask and number format.
    limits = {"autoregressive": 120}
    found += [Item(f"numbers {f}", "numbers:compare", limits.get(f, 60), {"family": f}) for f in FAMILIES]
    found += [
        trained("unet_256", "starting point", 120, profiled=True),
        trained("transformer", "starting point", 180, profiled=True),
        encoding(256),
        trained("unet_256", "as shipped", 90),
        trained("unet_512", "starting point", 120, profiled=True),
        encoding(512),
        training_numbers(),
        Item("tests", "suite:marked_tests", 150, {"processes": 1 if small else 4}),
        encode_job(small),
    ]
    found += [
        other("attention", "decoder", 120, ["--parts", "attention", "--rounds", "10"], ["--rounds", "1"]),
        other("norms", "norms", 90, ["--seconds", "0.05", "--most", "3"], ["--seconds", "0", "--most", "1"]),
        other("adam16", "adam16", 90, ["--rounds", "10"], ["--width", "64", "--layers", "1", "--rounds", "1"]),
    ]
    found += list(levers("unet_256", small))
    found += list(levers("transformer", small))
    found += [trained("unet_256_of_128", name, 90) for name in ("starting point", "Lightning")]
    found += [] if small else [trained("unet_256_of_128", "CUDA graphs", 150)]
    found += [
        trained("unet_256", "all that pay", 150, profiled=True),
        trained("transformer", "all that pay", 150, profiled=True),
        trained("unet_512", "all that pay", 150, profiled=True, like="unet_256"),
    ]
    found += [] if small else [trained("unet_256_of_128", "CUDA graphs, Lightning", 150)]
    found += [
        other("geglu", "geglu", 60, ["--seconds", "0.05"], ["--seconds", "0", "--uncompiled"]),
        other(
            "powersgd cost",
            "powersgd_cost",
            60,
            ["--widths", "1920", "3968", "--ranks", "512", "896", "--rounds", "10"],
            ["--widths", "64", "--ranks", "32", "--shards", "4", "--rounds", "1"],
        ),
        other("sampling", "decoder", 90, ["--parts", "sampling", "--batch", "8"], ["--batch", "1"]),
        other("muon", "muon", 60, ["--rounds", "10"], ["--width", "64", "--layers", "1", "--rounds", "1"]),
        other("average", "ema", 60, ["--rounds", "10"], ["--rounds", "1"]),
        trained("unet_512", "as shipped", 90),
        other("operators", "operators", 120, ["--parts", "times"], ["--parts", "times", "--rounds", "1"]),
    ]
    found += list(levers("unet_512", small))
    found.append(Item("import of Lightning", "device:lightning", 60))
    return found


def trained(subject: str, name: str, limit: float, **arguments: Any) -> Item:
    """A setting of a recipe's training."""
    return Item(f"{subject}, {name}", "trained:setting", limit, {"subject": subject, "name": name, **arguments})


def levers(subject: str, small: bool) -> Iterator[Item]:
    """Every change of a recipe alone; those that compile come last, because they take longest."""
    compiled = []
    for name, (_, compiles) in settings(SUBJECTS[subject], small).items():
        if compiles:
            compiled.append(trained(subject, name, 150))
        else:
            yield trained(subject, name, 90)
    if not small:
        yield from compiled


def encoding(resolution: int) -> Item:
    """The VAE's rate at a resolution."""
    return Item(f"VAE encoding at {resolution}", "encoding:rates", 120, {"resolution": resolution})


def training_numbers() -> Item:
    """Whole runs of both engines and of FSDP on one device, compared with a loop of PyTorch alone. What compiles takes
    too long."""
    ways = ["--parts", "numbers", "--only", "one device", "CUDA graphs", "SHARD_GRAD_OP", "FULL_SHARD"]
    tiny = ["--models", "transformer", "--precisions", "fp32", "--steps", "2"]
    return other("training numbers", "divided_training", 120, ways, [*ways, *tiny])


def encode_job(small: bool) -> Item:
    """The rate of a whole encode job."""
    large = {"resolution": 256, "sizes": [(1024, 768)], "images": 24_576}
    tiny = {"resolution": 64, "sizes": [(96, 72)], "images": 16}
    return Item("encode job", "encode_job:rates", 120, tiny if small else large)


def other(name: str, module: str, limit: float, arguments: list[str], small: list[str]) -> Item:
    """Another benchmark of this folder."""
    if module == "decoder":  # tiny sizes of a part that both command lines name
        small = ["--parts", name, *small, "--size", "tiny"]
    return Item(name, "context:benchmark", limit, {"module": module, "arguments": arguments, "small": small})
