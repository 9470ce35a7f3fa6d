"""The model card of an export: what was trained, on what, and three lines that draw a picture or open the model."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.manifest import Manifest
from recipes.generation.exports import read_record

SNIPPETS = {
    "diffusers": """\
from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained("{folder}")
pipeline("red heart", num_inference_steps=25, guidance_scale={guidance:g}).images[0].save("red_heart.png")
""",
    # The rest is run in a checkout of the repository.
    "native": """\
from recipes.generation.exports import draw
images = draw("{folder}", ["red heart"], seeds=[0], guidance={guidance:g})  # (1, H, W, 3) uint8
images[0]
""",
    "language": """\
from pathlib import Path
from recipes.models.language.task import load_language
network = load_language(Path("{folder}", "transformer"))  # tokens (B, S) int64 -> hidden states (B, S, d)
""",
    "dvae": """\
from pathlib import Path
from recipes.models.dvae.files import load_dvae
network = load_dvae(Path("{folder}"))  # tokens and decode
""",
}
# What says that a model is one of those that generate nothing from captions and that no library opens.
OWN = {"language": "transformer/config.json", "dvae": "encoder.safetensors"}
CHECKOUT = "Run these lines in a checkout of Precompose, which trained the model."


def model_card(export: Path, layout: str, out: str, guidance: float | None) -> str:
    """The Markdown text of README.md, with the metadata that model hubs read at its top.

    Args:
        export: the native export, with export.json and, for encoded data, its manifest.
        layout: native, or diffusers for a pipeline of diffusers.
        out: name of the folder, for the snippet.
        guidance: default of the guidance of the model's family; None: it generates nothing from captions.
    """
    record = read_record(export, "run_name", "batches", "samples")
    facts = {
        "Run": record["run_name"],
        "Trained for": f"{record['batches']:,} batches, {record['samples']:,} samples",
        "Weights": record.get("weights", "as trained"),
        **{name.capitalize(): record[name] for name in ("family", "denoiser", "objective") if name in record},
    }
    if "started_from" in record:
        facts["Started from"] = f"weights of {record['started_from']}"
    if "resolution" in record:
        facts["Resolution"] = f"{record['resolution']} pixels"
    if "images" in record:  # in all sets, of which the manifest is that of the first
        facts["Training images"] = f"{record['images']:,}"
    if (export / MANIFEST).is_file():
        facts |= _of_manifest(Manifest.read(export))
    metadata = ["library_name: diffusers"] if layout == "diffusers" else []
    metadata += ["pipeline_tag: text-to-image"] if guidance is not None else []
    lines = ["---", *metadata, "---", ""] if metadata else []
    lines += [f"# {_cell(record['run_name'])}", ""]
    named = layout if guidance is not None else next((n for n, file in OWN.items() if (export / file).is_file()), None)
    if named is not None:
        snippet = SNIPPETS[named].format(folder=out, guidance=guidance or 0.0)
        lines += ["```python", snippet.rstrip(), "```", ""]
        lines += [CHECKOUT + _of_packages(record), ""] if named != "diffusers" else []
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in facts.items()), ""]
    return "\n".join(lines)


def _of_packages(record: dict[str, Any]) -> str:
    """Which packages must be installed there: those whose components the model has."""
    named = (str(record[group]) for group in ("denoiser", "objective") if group in record)
    packages = sorted({name.partition(".")[0] for name in named if "." in name})
    return f" There, {' and '.join(map(_cell, packages))} must be installed, too." if packages else ""


def _of_manifest(manifest: Manifest) -> dict[str, Any]:
    """What encoded the training data, and how."""
    facts = {
        "Crop": f"{manifest.crop}, {manifest.crops} per image",
        "Captions": manifest.caption_policy,
        "Normalisation": manifest.normalisation,
    }
    for title, encoder in (("Image encoder", manifest.image_encoder), ("Text encoder", manifest.text_encoder)):
        if encoder is not None:
            facts[title] = f"{encoder['id']}, {encoder['precision']}, sha256 {encoder['weights_hash']}"
    return facts | {"Encoded with": ", ".join(f"{name} {version}" for name, version in manifest.software.items())}


def _cell(value: Any) -> str:
    """A value in one line, without HTML: the export may be somebody else's."""
    return " ".join(escape(str(value), quote=False).split()).replace("|", "\\|")
