"""Every callback that a recipe can name goes through a whole run, with and without an average of the weights."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from callbacks import progress
from data.encoded.manifest import Manifest
from data.loading import Loading
from data.tokenizers.vocabulary_files import VocabularyFile
from recipes.config.build import build, encoders_of
from recipes.config.components import COMPONENTS
from recipes.config.schema import Checker
from recipes.models.autoregressive.task import Autoregressive
from recipes.training.callback import Callback
from tests.callbacks.stand_ins import IMAGES, TOKENS, Average, Everything, Scaling
from tests.recipes.training.fake_run import FakeRun, train


@dataclass
class Case:
    """A callback, and what it does in a run of 6 batches, 2 per epoch, with a validation every 3 batches.

    Attributes:
        group: of the component.
        arguments: of a recipe.
        logs: name of a figure -> the batches at which it is logged.
        settings: what is logged once.
        images: batches at which images are logged.
        files: what is in the run's folder afterwards.
        says: part of what is printed.
    """

    group: str = "callback"
    arguments: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, list[int]] = field(default_factory=dict)
    settings: list[str] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    says: str = ""


ALWAYS = [1, 2, 3, 4, 5, 6]
SHARES = [f"exponents/{name}" for name in ("zero", "nonfinite", "below_fp16", "above_fp16", "outside_1_6_9")]
RATES = ["samples_per_sec", "device/samples_per_sec", "batches_per_sec", "device/tflops_per_sec"]
PARTS = [f"time/share/{part}" for part in ("data", "forward", "backward", "optimizer", "ema")]
DRAWN = {"prompts": ["a dot", "a star"], "every": "4ba", "batch": 1}
GRIDS = ["samples/ba0000004.png", "samples/ba0000006.png"]

CASES = {
    "codebook": Case(
        logs={"codebook/val/usage": [3, 6], "codebook/val/perplexity": [3, 6]},
        says="name: val at batch 3: 100.0% of 8 codes used, perplexity 8.0\n",
    ),
    "exponents": Case(
        arguments={"every": "3ba"},
        logs=dict.fromkeys(SHARES, [3]),
        files=["exponents/ba0000003.json", "exponents/ba0000003.png"],
    ),
    "export": Case(
        arguments={"every": "2ba"},
        files=["export/done.json", "export/export.json", "export/first_weight"],
        says="weights: ",
    ),
    "fid": Case(
        arguments={"every": "4ba", "images": 5, "extractor": "contrastive", "sampling": {"steps": 1}},
        logs={"images/fid": [4, 6], "images/kid": [4, 6], "images/kid_std": [4, 6]},
        says="fid: 5 images against 40 pictures, picture tower",
    ),
    "gradient_scales": Case(files=["gradient_scales.json", "gradient_scales.png"]),
    "lr_monitor": Case(logs={"lr-SGD/group0": ALWAYS}),
    "memory_monitor": Case(says="memory_monitor: this run is on a CPU, so there is no GPU memory to log\n"),
    "progress": Case(arguments={"seconds": 0.0}, says="name: 100%, batch 6, loss 0."),
    "sample_grid": Case(arguments=DRAWN | {"steps": 2}, images=[4, 6], files=GRIDS, says="samples: "),
    "token_grid": Case(arguments=DRAWN, images=[4, 6], files=GRIDS, says="samples: "),
    "reconstructions": Case(
        arguments={"every": "0.5dur", "pictures": 2},
        images=[3, 6],
        files=["reconstructions/ba0000003.png", "reconstructions/ba0000006.png"],
    ),
    "scheduled_value": Case(
        arguments={"value": "temperature", "start": 1.0, "end": 0.5},
        logs={"schedule/temperature": [0, 1, 2, 3, 4, 5]},
    ),
    "throughput": Case(
        arguments={"window": 3, "communication_every": "2ba"},
        logs={
            **dict.fromkeys([*(f"throughput/{rate}" for rate in RATES), *PARTS], [3, 4, 5, 6]),
            "time/share/communication": [3, 4, 5, 6],
        },
        settings=["forward_gflop_per_sample"],
    ),
    "unigram": Case(
        arguments={"column": "tokens"},
        logs={"metrics/val/unigram_loss": [3, 6]},
        says="name: val at batch 3: frequencies alone would have ",
    ),
    "plateau": Case(
        group="schedule",
        arguments={"warmup": "1ba", "window": 1, "patience": 1, "threshold": 0.9},
        logs={"schedule/plateaus": ALWAYS},
        says="plateau: number 1 at batch ",
    ),
}


def test_every_callback_has_a_case():
    assert set(CASES) == {*COMPONENTS["callback"], "plateau"}


@pytest.fixture
def drawing(request, tmp_path):
    """name -> the model that a callback draws images with, and the data that it was trained on."""

    def make(name):
        if name in ("sample_grid", "fid"):
            task = build(request.getfixturevalue("small_recipe")(tmp_path).model)
            manifest = Manifest.read(request.getfixturevalue("latent_sets") / "train")
            null_text = torch.zeros(12, 16, dtype=torch.float16)
            return task, Loading(loader=None, manifest=manifest, resolution=16, null_text=null_text)
        if name == "token_grid":
            sets = request.getfixturevalue("token_sets")
            manifest, vocabulary = Manifest.read(sets / "train"), VocabularyFile.read(sets / "vocabulary.json")
            task = Autoregressive(
                layers=1, width=16, heads=2, text_positions=16, text_vocabulary=280, side=4, codes=32, kernel=3
            )
            return task, Loading(loader=None, manifest=manifest, resolution=32, vocabulary=vocabulary)
        return None, Loading(loader=None)

    return make


@pytest.fixture
def places(request):
    """name -> arguments of a callback that are files of this session."""

    def make(name):
        if name != "fid":
            return {}
        tars = f"{request.getfixturevalue('drawings')}/train/*.tar"
        path = str(request.getfixturevalue("clip_folder"))
        return {"reference": {"name": "tars", "urls": tars}, "path": path}

    return make


def plain(state):
    """A callback's state, with lists in place of tensors."""
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


@pytest.mark.parametrize("averages", [False, True], ids=["plain", "averaged"])
@pytest.mark.parametrize("name", CASES)
def test_a_whole_run(name, averages, drawing, places, tmp_path, monkeypatch, capsys):
    case, output = CASES[name], tmp_path / "run"
    monkeypatch.setattr(progress.time, "monotonic", itertools.count().__next__)
    other, loading = drawing(name)

    def run(state=None):
        """(run, callback) after a run."""
        trained = Everything()
        task = other or trained
        average, scaling = Average(task) if averages else None, Scaling(bad_batches=(2,))
        checker = Checker(COMPONENTS)
        component = checker.component(case.group, {"name": name, **case.arguments, **places(name)}, name)
        assert not checker.errors and not checker.missing
        context = {
            "task": task,
            "run_name": "name",
            "output": str(output),
            "loading": loading,
            "copies": 1,
            "encoders": lambda: encoders_of(loading.manifest),
            "blank": lambda: Everything().to("meta"),
            "started_from": None,
            "average": average,
            "scaling": scaling,
        }
        callback = build(component, **context)
        assert isinstance(callback, Callback)
        fake = FakeRun(trained, duration="6ba")
        levers = [lever for lever in (scaling, average) if lever is not None]
        data = [IMAGES | TOKENS] * 2
        generator = torch.get_rng_state()
        load = None if state is None else lambda: callback.load_state_dict(state)
        train(fake, data, [callback], levers, microbatch=2, evals={"val": data}, eval_every=3, load=load)
        assert torch.equal(torch.get_rng_state(), generator), "training would have other random numbers"
        return fake, callback

    fake, callback = run()
    figures = {figure for _, logged in fake.logged for figure in logged}
    assert {figure: list(fake.values(figure)) for figure in figures} == case.logs
    assert list(fake.settings) == case.settings
    assert [batch for batch, _, _ in fake.images] == case.images
    assert all(images.dtype == "uint8" and images.ndim == 4 and images.shape[-1] == 3 for _, _, images in fake.images)
    assert sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()) == case.files
    said = capsys.readouterr().out
    assert case.says in said if case.says else said == ""

    torch.save(callback.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)  # tensors and plain values alone
    assert plain(state) == plain(callback.state_dict())
    _, resumed = run(state)
    assert resumed.state_dict().keys() == state.keys()
    resumed.load_state_dict(state)
    assert plain(resumed.state_dict()) == plain(state)
