"""Components become objects, nested ones first; encoders are those that a manifest names, or it is an error."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.encoded.manifest import Manifest
from data.system.errors import Outage
from recipes.config.build import build, build_on_meta, encoders_of, located
from recipes.config.schema import Component
from recipes.models.latent_diffusion.ddpm import DDPM
from recipes.models.latent_diffusion.unet import UNet
from recipes.models.task import Task


def component(group, name, target, **args):
    return Component(group, name, args, target, group)


TARS = "data.sources.tars:TarSource"
SIZES = {"channels": [16, 16], "attention": [False, True], "heads": [1, 1], "text_width": 8, "norm_groups": 8}


def denoiser(**changes):
    target = "recipes.models.latent_diffusion.unet:unet"
    return component("denoiser", "unet", target, **(SIZES | {"blocks": 1} | changes))


def task(**args):
    return component("model", "latent_diffusion", "recipes.models.latent_diffusion.task:LatentDiffusion", **args)


def objective(**args):
    return component("objective", "ddpm", "recipes.models.latent_diffusion.ddpm:DDPM", **args)


def test_nested_components_come_first():
    model = build(task(denoiser=denoiser(), objective=objective(steps=50, eval_timesteps=[1])))
    assert type(model).__name__ == "LatentDiffusion" and type(model.denoiser).__name__ == "UNet"
    assert model.objective.schedule.steps == 50


def test_lists_dicts_and_plain_values():
    made = build({"a": [denoiser(), 3], "b": (None, "text")})
    assert type(made["a"][0]).__name__ == "UNet" and made["a"][1] == 3 and made["b"] == (None, "text")


def test_context_goes_to_builders_that_ask_for_it():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    adamw = component("optimizer", "adamw", "recipes.algorithms.optimizers:adamw", lr=0.5)
    optimizer = build(adamw, parameters=parameters, unused=object())
    assert optimizer.param_groups[0]["params"] == parameters and optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="adamw asks for parameters, which no optimizer is given; the keys"):
        build(adamw)


@pytest.mark.parametrize(
    ("made", "path", "said"),
    [
        (lambda: task(denoiser=denoiser(blocks=0), objective=objective()), "model.denoiser", "unet: blocks: 0; give"),
        (lambda: objective(min_snr_gamma=-1), "model.objective", "model.objective.min_snr_gamma must be above 0"),
        (lambda: component("source", "tars", TARS, urls="no.tar"), "data.source", "data.source.urls: no file no.tar"),
        (lambda: component("source", "tars", TARS, urls="no.tar"), "source", "source.urls: no file no.tar"),
    ],
)
def test_what_a_builder_refuses_names_its_key(made, path, said):
    found = made()
    inner = found.args.get("denoiser", found)
    object.__setattr__(inner, "path", path)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{said}") as error:
        build(found)
    assert error.traceback[-1].path.name != "build.py"  # where it was refused is not hidden


def test_a_store_that_does_not_answer_while_a_component_is_built_names_its_path():
    with pytest.raises(Outage, match="^model: s3://sets/train/manifest.json: cannot be fetched"), located(task()):
        raise Outage("s3://sets/train/manifest.json: cannot be fetched (no answer)")


def test_a_traceback_of_a_component_ends_with_its_path():
    with pytest.raises(KeyError) as found, located(task()):
        {}["width"]
    assert found.value.__notes__ == ["in model: recipes.models.latent_diffusion.task:LatentDiffusion"]


class OwnUNet(UNet):
    """It inherits its `name`."""


class OwnDDPM(DDPM):
    """It inherits its `name`."""


def small_ddpm(*, steps=10):
    """A preset of another component, as which exports may open it."""
    return DDPM(steps=steps, eval_timesteps=[1])


@pytest.mark.parametrize(("group", "kind", "own"), [("denoiser", OwnUNet, "unet"), ("objective", OwnDDPM, "ddpm")])
def test_exports_would_open_what_has_the_name_of_another_as_that(monkeypatch, group, kind, own):
    made = denoiser() if group == "denoiser" else objective()
    built = build(made)
    built.__class__ = kind
    monkeypatch.setattr("recipes.config.build.import_builder", lambda component: lambda **arguments: built)
    found = component(group, "mine.other", made.target, **made.args)
    with pytest.raises(ValueError, match=f"^{group}: the attribute `name` of .* is '{own}'; set it to 'mine.other'"):
        build(found)


def test_a_preset_of_another_component():
    found = build(component("objective", "mine.small", f"{__name__}:small_ddpm", steps=20))
    assert type(found) is DDPM and found.name == "ddpm" and found.schedule.steps == 20


class Lazy(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LazyLinear(3)


class Reading(Task):
    def __init__(self):
        super().__init__()
        self.rates = torch.linspace(0, 0.1, 4).tolist()


@pytest.mark.parametrize(
    ("model", "on_meta", "said"),
    [
        (Lazy, False, "^model: the size of layer.weight of Lazy .* is not known before the first batch; use a layer"),
        (Lazy, True, "^model: the size of layer.weight of Lazy"),
        (Reading, True, "^model: .*:Reading cannot be built on PyTorch's meta device.*test_build.py, line .*device="),
    ],
)
def test_models_that_cannot_be_counted_or_built_without_values(model, on_meta, said):
    """They were tracebacks of dry runs, and a model of lazy layers of every run."""
    with pytest.raises(ValueError, match=said):
        (build_on_meta if on_meta else build)(component("model", "own", f"{__name__}:{model.__name__}"))


def test_meta_takes_no_memory():
    model = build_on_meta(task(denoiser=denoiser(channels=[4096, 4096]), objective=objective()))
    assert all(p.is_meta for p in model.parameters())


@pytest.fixture
def manifest(latent_sets):
    return Manifest.read(latent_sets / "train")


def change_weights(folder):
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name] + 1
    save_file(tensors, file)


def test_encoders_of_a_set(manifest):
    images, texts = encoders_of(manifest)
    assert (images.weights_hash, texts.weights_hash) == (
        manifest.image_encoder["weights_hash"],
        manifest.text_encoder["weights_hash"],
    )


@pytest.mark.parametrize("group", ["image_encoder", "text_encoder"])
def test_encoders_whose_weights_have_changed(manifest, vae_folder, clip_folder, tmp_path, group):
    shutil.copytree({"image_encoder": vae_folder, "text_encoder": clip_folder}[group], tmp_path / group)
    encoders_of(manifest, tmp_path)
    # Copies in a bundle come before the places that the manifest names.
    change_weights(tmp_path / group)
    with pytest.raises(ValueError) as error:
        encoders_of(manifest, tmp_path)
    assert f"manifest.{group}: the weights of {tmp_path / group}" in str(error.value)
    assert getattr(manifest, group)["weights_hash"][:12] in str(error.value) and "\n" not in str(error.value)


def test_an_encoder_whose_scaling_factor_has_changed(manifest, vae_folder, tmp_path):
    """Its weights are the same. Latents of the set would be decoded by a wrong factor, to pictures that are nearly
    right."""
    folder = shutil.copytree(vae_folder, tmp_path / "image_encoder")
    config = json.loads((folder / "config.json").read_text())
    before = config["scaling_factor"]
    (folder / "config.json").write_text(json.dumps(config | {"scaling_factor": 2 * before}))
    with pytest.raises(ValueError, match=f"has scaling_factor {2 * before}, and the set was encoded with {before}; r"):
        encoders_of(manifest, tmp_path)


@pytest.mark.parametrize("name, value", [("layer", "first"), ("length", 3)])
def test_a_text_encoder_that_reads_captions_in_another_way(manifest, name, value):
    """Such as by a key of one's own whose default has changed since: its weights are the same. By another layer images
    were drawn with other embeddings than those of the training data, and another length was a RuntimeError."""
    changed = dataclasses.replace(manifest, text_encoder=manifest.text_encoder | {name: value})
    line = f"^manifest.text_encoder: .* has {name} {manifest.text_encoder[name]}, and the set was encoded with {value}"
    with pytest.raises(ValueError, match=line):
        encoders_of(changed)


def test_encoders_that_are_gone(manifest, latent_sets, tmp_path):
    values = json.loads((latent_sets / "train" / "manifest.json").read_text())
    values["image_encoder"]["component"]["path"] = str(tmp_path / "gone")
    with pytest.raises(ValueError, match="manifest.image_encoder.path: .*gone"):
        encoders_of(Manifest.parse(json.dumps(values)))
    with pytest.raises(ValueError, match=f"image_encoder.path: .*; nor is a copy in {tmp_path}/export/image_encoder$"):
        encoders_of(Manifest.parse(json.dumps(values)), tmp_path / "export")
    values["image_encoder"]["component"]["pth"] = 1
    with pytest.raises(ValueError, match="manifest.image_encoder.pth: unknown key"):
        encoders_of(Manifest.parse(json.dumps(values)))
