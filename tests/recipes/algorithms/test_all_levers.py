"""What every lever keeps to; and all of them together train, resume exactly and export."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn

from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.microbatch.search import MicrobatchSearch
from recipes.algorithms.modules import fused_group_norm, low_precision_norms
from recipes.algorithms.modules.fused_group_norm import FusedGroupNorms
from recipes.algorithms.modules.low_precision_norms import LowPrecisionGroupNorm, LowPrecisionNorms
from recipes.algorithms.sharding.fsdp import Sharding
from recipes.config.build import build, import_builder
from recipes.config.components import COMPONENTS
from recipes.config.schema import Checker
from recipes.models.kernels.fused_norm import FusedGroupNorm
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.levers import Levers
from tests.recipes.engines.composer.inside import lever_of
from tests.recipes.training.fake_run import FakeRun

NAMES = list(COMPONENTS["algorithm"])
# Required keys of levers.
REQUIRED = {"scheduled_ema": {"decay": 0.9}, "powersgd": {"rank": 2}}


class Nothing(Task):
    """A task without convolution, norm, attention, blocks, or a parameter that is trained."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2).requires_grad_(False)


def component_of(name):
    checker = Checker(COMPONENTS)
    component = checker.component("algorithm", {"name": name, **REQUIRED.get(name, {})}, "algorithms.lever")
    assert not checker.errors
    return component


@pytest.mark.parametrize("name", NAMES)
def test_a_lever_that_finds_nothing_to_change_raises(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    run = FakeRun(Nothing(), precision="amp_bf16")
    if name != "compile":  # which asks for a compiler first
        run.device = torch.device("cuda")  # by which levers decide; tensors stay on the CPU
    with pytest.raises(ValueError, match=f"^{name}: ") as error:
        given = {"task": run.task, "low_rank": False, "clips": False, "scaling": None, "samples": 8}
        levers = Levers([build(component_of(name), **given)])
        levers.prepare(run)
        levers.compile(run)
        levers.call("begin", run)
    assert "\n" not in str(error.value)


def test_levers_of_recipes_are_levers():
    found = {name: import_builder(component_of(name)) for name in NAMES}
    assert all(issubclass(kind, Lever) for kind in found.values())
    assert len({kind.__name__ for kind in found.values()}) == len(found)
    for name, kind in found.items():
        assert kind.__doc__ and inspect.signature(kind.state_dict).parameters.keys() == {"self"}, name


def test_names_under_which_checkpoints_hold_states():
    """Renaming one of these classes would make its state in old checkpoints be ignored."""
    kinds = [*(import_builder(component_of(name)) for name in NAMES), ClipByNorm, MicrobatchSearch, Sharding]
    stateful = {kind.__name__ for kind in kinds if kind.state_dict is not Lever.state_dict}
    assert stateful == {"MicrobatchSearch", "PowerSGD", "ResblockGradScaling", "ScheduledEMA"}


# --- all together ----------------------------------------------------------------------------------------------------

LEVERS = [
    "model.denoiser.channels=[32,64]",
    "model.denoiser.attention=[true,false]",
    "model.denoiser.heads=[1,2]",
    "algorithms.fused_group_norm={name: fused_group_norm, when: always}",
    "algorithms.norms={name: low_precision_norms, modules: denoiser}",  # acts before it all the same
    "algorithms.compile={name: compile, backend: eager}",
    "algorithms.recompute={name: activation_checkpointing, every: 2}",
    "algorithms.ema={name: scheduled_ema, decay: 0.9, start: 3ba}",
    "callbacks.export={name: export}",
    "training.grad_clip=1.0",
    "training.microbatch=4",
    "training.duration=9ba",
]


@pytest.fixture
def low_precision_on_a_cpu(monkeypatch):
    """Runs on a CPU have no autocast, and the levers refuse. Modules are changed all the same, under an autocast around
    the task's loss; instead of the kernels, the code that these are tested against computes the norms."""

    def lower(self, run):
        low_precision_norms.lower_norms(self.task, **self.options)

    def fuse(self, run):
        fused_group_norm.fuse_group_norms(self.task, measured=False)

    def forward(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(self, batch)

    plain = LatentDiffusion.forward
    monkeypatch.setattr(LatentDiffusion, "forward", forward)
    monkeypatch.setattr(LowPrecisionNorms, "change_modules", lower)
    monkeypatch.setattr(FusedGroupNorms, "change_modules", fuse)


def check_all_levers(small_recipe, folder: Path, *changes: str) -> None:
    """A run without a stop, and one that is broken off and goes on, end with the same weights and averages."""
    from recipes.engines.composer.trainer import build_trainer

    save = "checkpoints={every: 6ba, keep: -1, autoresume: false}"
    trained = {}
    for name, load in (
        ("whole", []),
        ("resumed", [f"checkpoints.load_path={folder}/whole/checkpoints/ep1-ba6-rank0.pt"]),
    ):
        trainer = build_trainer(small_recipe(folder / name, *LEVERS, save, *load, *changes))
        model = trainer.state.model.task
        assert len(list(trainer.state.algorithms[0].levers)) == 12
        fused = [m for m in model.modules() if isinstance(m, FusedGroupNorm)]
        assert len(fused) > 8 and all(isinstance(m, LowPrecisionGroupNorm) for m in fused)
        assert not any(type(m) in (nn.GroupNorm, nn.LayerNorm) for m in model.modules())
        kernels = [p for p in model.parameters() if p.dim() == 4 and p.shape[2:].numel() > 1]
        assert kernels and all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
        assert trainer.state.timestamp.batch == (6 if load else 0)
        trainer.fit()
        trainer.close()
        average = lever_of(trainer, ScheduledEMA).average
        trained[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
        trained[name] |= {f"average of {n}": t for n, t in average.tensors().items()}
    assert trained["whole"].keys() == trained["resumed"].keys()
    assert [n for n, t in trained["whole"].items() if not torch.equal(t, trained["resumed"][n])] == []
    export = folder / "whole" / "export"
    assert json.loads((export / "done.json").read_text())["average"]["begun"] == 3
    for part, prefix in (("unet", "denoiser.network."), ("unet_ema", "average of denoiser.network.")):
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
    # Convolutions and attention may else add in another order each time; what has no such kernel warns.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check_all_levers(small_recipe, tmp_path, *gpu)
    finally:
        torch.use_deterministic_algorithms(False)
