"""How a family of models takes part in recipes/generate.py. Nothing heavy is imported here.

A package in `recipes/models` whose models generate images from captions has a file `family.py` with one `Family`, named
`FAMILY`. That is all that generation needs to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.encoded.manifest import Manifest


class NotInDiffusersError(ValueError):
    """diffusers has no such network, or no such sampler."""


@dataclass(frozen=True)
class Family:
    """A family of models that generate images.

    Attributes:
        title: name in messages and --help, as in "a diffusion model".
        networks: folders by which exports are recognised that were written before export.json named the family.
        guidance: default of --guidance, for --help.
        options: the family's own command-line options, such as --steps, with the arguments of
            `argparse.ArgumentParser.add_argument`. An option that is given becomes a keyword of the pipeline's
            `generate`; one that is not given is left to the default there, so `default` must not be set here.
        pipeline: "module:function" of a function that takes `ExportParts` and returns the family's pipeline, which has
            `device`, `resolution`, `image_encoder`, `generate(captions, *, seeds, batch, guidance, <options>)` ->
            (N, H, W, 3) uint8, and `lost_tokens(captions)`, the number of tokens that are cut from each. Evaluations
            need squares of the side `resolution`, or of an option of this name. An image depends on its caption and
            its own one of the N `seeds` alone, and not on its batch: those of several processes, and of runs that go
            on, are then the same.
        diffusers: "module:function" of a function that takes `ExportParts` and a new folder and writes a pipeline of
            diffusers into it, or raises `NotInDiffusersError`; None: diffusers has none.
    """

    title: str
    networks: tuple[str, ...]
    guidance: float
    options: dict[str, dict[str, Any]]
    pipeline: str
    diffusers: str | None = None


@dataclass(frozen=True)
class ExportParts:
    """The parts of an export from which a family builds its pipeline.

    Attributes:
        folder: the export.
        record: the contents of its export.json.
        network: the folder of the network's weights in the export, raw or averaged.
        manifest: the manifest of the training data.
        image_encoder: decodes latents or tokens.
        text_encoder: embeds captions; None for models of tokens.
        component_class: (group, name) -> the class of a component that a recipe may name.
        device: cpu or cuda.
        precision: of the network: fp32, bf16 or fp16.
    """

    folder: Path
    record: dict[str, Any]
    network: Path
    manifest: Manifest
    image_encoder: Any
    text_encoder: Any
    component_class: Callable[[str, str], type]
    device: str
    precision: str
