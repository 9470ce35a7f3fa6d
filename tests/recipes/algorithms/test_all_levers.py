"""Every lever raises where there is nothing to change; all of them together train, resume exactly and export."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer.core import Event, Precision, Time, Timestamp
from diffusers import UNet2DConditionModel
from torch import nn

from recipes.algorithms.averaging.scheduled_ema import running_average
from recipes.algorithms.modules import fused_group_norm, low_precision_norms
from recipes.algorithms.modules.fused_group_norm import FusedGroupNorms
from recipes.algorithms.modules.low_precision_norms import LowPrecisionNorms
from recipes.config.build import build
from recipes.config.components import COMPONENTS
from recipes.config.schema import Checker
from recipes.engines.composer.trainer import build_trainer
from recipes.models.kernels.fused_norm import FusedGroupNorm
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.task import Task

# Required keys of algorithms, and what they say of a model that has nothing for them.
REQUIRED = {"scheduled_ema": {"decay": 0.9}, "powersgd": {"rank": 2}}
EVENTS = (Event.INIT, Event.BEFORE_LOAD, Event.FIT_START)


class Nothing(Task):
    """A task without convolution, norm, attention, blocks, or a parameter that is trained."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2).requires_grad_(False)


@pytest.mark.parametrize("name", COMPONENTS["algorithm"])
def test_a_lever_that_finds_nothing_to_change_raises(name):
    task = Nothing()
    checker = Checker(COMPONENTS)
    component = checker.component("algorithm", {"name": name, **REQUIRED.get(name, {})}, "algorithms.lever")
    assert not checker.errors
    state = SimpleNamespace(
        model=task,
        algorithms=[],
        device=SimpleNamespace(name="cpu" if name == "compile" else "gpu"),  # it asks for a compiler first
        precision=Precision.AMP_BF16,
        timestamp=Timestamp(),
        max_duration=Time.from_timestring("10ba"),
        dataloader_len=None,
    )
    logger = SimpleNamespace(log_hyperparameters=lambda values: None)
    with pytest.raises(ValueError, match=f"^{name}: ") as error:
        algorithm = build(component, task=task)
        state.algorithms.append(algorithm)
        for event in EVENTS:
            if algorithm.match(event, state):
                algorithm.apply(event, state, logger)
    assert "\n" not in str(error.value)


# --- all together ----------------------------------------------------------------------------------------------------

LEVERS = [
    "model.denoiser.channels=[32,64]",
    "model.denoiser.attention=[true,false]",
    "model.denoiser.heads=[1,2]",
    "algorithms.low_precision_norms={name: low_precision_norms, modules: denoiser}",
    "algorithms.fused_group_norm={name: fused_group_norm, when: always}",
    "algorithms.compile={name: compile, backend: aot_eager}",
    "algorithms.ema={name: scheduled_ema, decay: 0.9, start: 3ba}",
    "callbacks.export={name: export}",
    "training.grad_clip=1.0",
    "training.microbatch=4",
    "training.duration=9ba",
]


@pytest.fixture
def low_precision_on_a_cpu(monkeypatch):
    """There Composer has no autocast, and the algorithms refuse. Their surgery is done all the same, under an autocast
    around the task's loss; in place of the kernels computes what they are tested against."""

    def lower(self, event, state, logger):
        low_precision_norms.lower_norms(self.task, **self.options)

    def fuse(self, event, state, logger):
        fused_group_norm.fuse_group_norms(self.task, measured=False)

    def forward(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(self, batch)

    plain = LatentDiffusion.forward
    monkeypatch.setattr(LatentDiffusion, "forward", forward)
    monkeypatch.setattr(LowPrecisionNorms, "apply", lower)
    monkeypatch.setattr(FusedGroupNorms, "apply", fuse)


def check_all_levers(small_recipe, folder: Path, *changes: str) -> None:
    """A run without a stop, and one that is broken off and goes on, end with the same weights and averages."""
    save = "checkpoints={every: 6ba, keep: -1, autoresume: false}"
    trained = {}
    for name, load in (
        ("whole", []),
        ("resumed", [f"checkpoints.load_path={folder}/whole/checkpoints/ep1-ba6-rank0.pt"]),
    ):
        trainer = build_trainer(small_recipe(folder / name, *LEVERS, save, *load, *changes))
        model = trainer.state.model
        assert sum(isinstance(m, FusedGroupNorm) for m in model.modules()) > 8
        assert not any(type(m) in (nn.GroupNorm, nn.LayerNorm) for m in model.modules())
        kernels = [p for p in model.parameters() if p.dim() == 4 and p.shape[2:].numel() > 1]
        assert kernels and all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
        assert trainer.state.timestamp.batch == (6 if load else 0)
        trainer.fit()
        trainer.close()
        average = running_average(trainer.state).average
        trained[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
        trained[name] |= {f"average of {n}": t for n, t in average.whole().items()}
    assert trained["whole"].keys() == trained["resumed"].keys()
    assert [n for n, t in trained["whole"].items() if not torch.equal(t, trained["resumed"][n])] == []
    export = folder / "whole" / "export"
    assert json.loads((export / "done.json").read_text())["average"]["begun"] == 3
    for part, prefix in (("unet", "task.denoiser.network."), ("unet_ema", "average of task.denoiser.network.")):
        saved = UNet2DConditionModel.from_pretrained(export / part).state_dict()
        assert all(torch.equal(tensor, trained["whole"][prefix + n].cpu()) for n, tensor in saved.items())
    plain = torch.load(folder / "whole" / "checkpoints" / "ep1-ba6-rank0.pt", weights_only=False)
    assert all("task." in n and "_orig_mod" not in n for n in plain["state"]["model"])


def test_all_levers_together(small_recipe, tmp_path, low_precision_on_a_cpu):
    check_all_levers(small_recipe, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_levers_together_on_a_gpu(small_recipe, tmp_path):
    gpu = ["training.device=gpu", "training.precision=amp_bf16", "algorithms.compile.backend=inductor"]
    check_all_levers(small_recipe, tmp_path, *gpu)
