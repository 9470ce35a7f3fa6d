"""Dry runs refuse what the run would refuse, in its words, and nothing that only this machine does not support."""

from pathlib import Path

import pytest

from recipes.config.recipe import Recipe, load_config
from recipes.engines.rehearsal import rehearse
from recipes.planning.dry_run import problems

ROOT = Path(__file__).resolve().parents[3]
YAMLS = sorted(path.name for path in (ROOT / "yamls").glob("*.yaml") if "\ntraining:" in path.read_text())
BF16 = "training.precision=amp_bf16"
MACHINES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty folder, and one device."""
    monkeypatch.chdir(tmp_path)
    for name in MACHINES:
        monkeypatch.delenv(name, raising=False)


def read(yaml, *overrides):
    return load_config(ROOT / "yamls" / f"{yaml}.yaml", list(overrides), Recipe, [])


@pytest.mark.parametrize("environment", [{}, MACHINES], ids=["one device", "two machines"])
@pytest.mark.parametrize("yaml", YAMLS)
def test_every_recipe(yaml, environment, monkeypatch, tmp_path, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    rehearse(read(yaml.removesuffix(".yaml"), "training.global_batch=2048"))
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("yaml", "overrides", "message"),
    [
        ("openmoji_text", ["algorithms.x={name: activation_checkpointing}"], "the model names no blocks"),
        ("openmoji_dalle", ["algorithms.x={name: attention}"], "no diffusers attention block to change"),
        ("openmoji_dalle", ["algorithms.x={name: channels_last}"], "no convolution over images to change"),
        ("openmoji_text", ["algorithms.x={name: compile}"], "the model names no blocks; set whole: true"),
        ("openmoji_dalle", ["algorithms.x={name: cudnn_benchmark}"], "the model has no convolution"),
        ("openmoji_text", ["algorithms.x={name: fp8}"], "fp8: nothing to change"),
        ("openmoji_dalle", ["algorithms.x={name: fused_geglu}"], "no GEGLU of diffusers to fuse"),
        ("openmoji_dalle", ["algorithms.x={name: fused_group_norm}"], "no GroupNorm of a diffusers block to fuse"),
        ("openmoji_dalle", ["algorithms.x={name: lean_blocks}"], "no residual, transformer or upsampling block"),
        ("openmoji_dvae", ["algorithms.x={name: low_precision_norms}", BF16], "no plain GroupNorm or LayerNorm"),
        ("openmoji_dalle", ["algorithms.x={name: noise_of_samples}"], "draws no noise for samples"),
        ("openmoji_dalle", ["algorithms.x={name: resblock_grad_scaling}", BF16], "training.precision is amp_bf16"),
        (
            "openmoji_dalle",
            ["algorithms.x={name: resblock_grad_scaling, weights: fp16}", "training.precision=fp32"],
            "weights: fp16 needs the optimizer adam16",
        ),
        ("openmoji_dalle", ["algorithms.x={name: powersgd, rank: 4, overlap: true}"], "overlap needs training.fsdp"),
        ("openmoji_diffusion", ["algorithms.x={name: scheduled_ema, decay: 0.9}"], "at most one ScheduledEMA"),
        ("openmoji_diffusion", ["algorithms.scheduled_ema.start=1000ba"], "leaves nothing to average"),
        ("openmoji_diffusion", ["algorithms.scheduled_ema.decay=null"], "give either decay or half_life"),
        ("openmoji_diffusion", ["schedule={name: cosine, warmup: 2000sp}"], "a warm-up of 2000sp cannot be taken"),
        ("openmoji_diffusion", ["training.fsdp={parameters: bf16}", "training.precision=fp32"], "^training.fsdp.param"),
        ("openmoji_diffusion", ["callbacks.x={name: gradient_scales}"], "the run has no resblock_grad_scaling"),
        ("openmoji_diffusion", ["callbacks.x={name: sample_grid, prompts: [a], steps: 0}"], "steps: 0; give 1 or more"),
        ("openmoji_diffusion", ["callbacks.x={name: sample_grid, prompts: [a], batch: 0}"], "batch 0"),
        ("openmoji_diffusion", ["callbacks.x={name: sample_grid, prompts: [a], guidance: .nan}"], "guidance: nan"),
        ("openmoji_diffusion", ["callbacks.x={name: sample_grid, prompts: [a], sampler: no}"], "sampler"),
        ("openmoji_dalle", ["callbacks.x={name: token_grid, prompts: [a], temperature: .nan}"], "temperature: nan"),
        ("openmoji_dalle", ["callbacks.x={name: token_grid, prompts: [a], top_p: .inf}"], "top_p: inf; give"),
        ("openmoji_text", ["callbacks.x={name: exponents}"], "exponents: ContrastiveText does not say which"),
        ("openmoji_dvae", ["callbacks.x={name: scheduled_value, value: y, start: 1, end: 2}"], "has no value `y`"),
    ],
)
def test_what_the_run_refuses(yaml, overrides, message):
    recipe = read(yaml, *overrides)
    with pytest.raises(ValueError, match=message):
        rehearse(recipe)
    (line,) = problems(recipe, rehearse)
    assert "\n" not in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithms.x={name: attention, implementation: xformers}"],
        ["algorithms.x={name: fused_group_norm, when: always}"],
        ["algorithms.x={name: low_precision_norms}"],  # precision: auto is bf16 on a GPU
        ["training.fsdp={replicas: 2}"],  # which torch 2.7 averages on GPUs alone
        ["training.microbatch=auto"],
    ],
)
def test_what_another_machine_can_do(overrides, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    rehearse(read("openmoji_unet", "training.device=auto", *overrides))


def test_lengths_in_epochs_of_data_that_is_not_here():
    """Nobody knows whether they fit."""
    rehearse(read("openmoji_diffusion", "schedule={name: cosine, warmup: 1ep}"))
