"""A run opens with ten lines, not with its whole config."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.planning.dry_run import describe_run
from recipes.planning.run_summary import opening

ROOT = Path(__file__).resolve().parents[3]


def lines(yaml, *overrides, samples=None, evals=None, world=1, precision="fp32"):
    recipe = load_config(ROOT / "yamls" / yaml, list(overrides), Recipe, [])
    evals = {label: SimpleNamespace(samples=count) for label, count in (evals or {}).items()}
    task = build_on_meta(recipe.model)
    return opening(recipe, task, SimpleNamespace(samples=samples), evals, world=world, precision=precision).splitlines()


def test_the_lines_of_a_diffusion_run():
    overrides = ["training.duration=2ep", "training.global_batch=32", "training.microbatch=4"]
    found = lines("openmoji_diffusion.yaml", *overrides, samples=3200, evals={"val": 50}, world=2)
    assert found == [
        "run:         openmoji_diffusion, engine composer",
        f"model:       latent_diffusion, {found[1].split()[2]} parameters, {found[1].split()[2]} of them trained",
        "data:        latents, 3,200 samples per epoch; validation val, 50 samples",
        "batch:       32 samples per step over 2 devices (WORLD_SIZE), 16 on each, in 4 microbatches of 4",
        "precision:   fp32, DDP",
        "optimizer:   adamw at 0.003, schedule cosine, gradient norm clipped at 1",
        "algorithms:  scheduled_ema",
        "length:      200 steps, 6,400 samples, 2.00 epochs of 100 steps",
        "checkpoints: at the end, the newest 2 kept, in runs/openmoji_diffusion/checkpoints",
        "config:      runs/openmoji_diffusion/config.yaml (--print-config prints it)",
    ]


def test_other_runs():
    found = lines("openmoji_vae.yaml", "training.engine=lightning", "checkpoints.save=false", evals={"val": None})
    assert found[0].endswith("engine lightning")
    assert found[2] == "data:        pictures, a stream without end; validation val"
    assert found[4] == "precision:   fp32, one device" and found[6] == "algorithms:  none"
    assert found[8] == "checkpoints: none; output in runs/openmoji_vae"
    overrides = [
        "training.fsdp={replicas: 2}",
        "checkpoints={every: 5ba, minutes: 30, keep: -1, autoresume: false, load_path: s3://x}",
    ]
    found = lines("openmoji_vae.yaml", *overrides)
    assert found[4] == "precision:   fp32, FSDP2 SHARD_GRAD_OP, replicas: 2"
    assert found[7] == "length:      2,000 steps, 8,000 samples"
    kept = "all kept, begun anew at each start, in runs/openmoji_vae/checkpoints; starts from s3://x"
    assert found[8] == f"checkpoints: every 5ba, and after 30 minutes without one, {kept}"


def test_a_run_that_resumes_does_not_say_that_it_starts_from_other_weights(tmp_path):
    overrides = [f"output={tmp_path}", "checkpoints.load_path=s3://x"]
    assert lines("openmoji_vae.yaml", *overrides)[8].endswith("/checkpoints; starts from s3://x")
    (tmp_path / "checkpoints" / "ep0-ba5").mkdir(parents=True)
    assert lines("openmoji_vae.yaml", *overrides)[8].endswith("/checkpoints")


@pytest.mark.parametrize(("warmup", "within"), [("21ba", True), ("1100sp", False), ("6ep", True), ("5ep", False)])
def test_a_run_that_ends_within_its_warm_up_says_so(warmup, within):
    """As with a shipped recipe whose duration alone was shortened."""
    overrides = ["training.duration=20ba", f"schedule.warmup={warmup}"]
    (found,) = (line for line in lines("openmoji_diffusion.yaml", *overrides, samples=256) if "length:" in line)
    text = f"; it ends within the warm-up of {warmup}, below optimizer.lr: shorten schedule.warmup"
    assert found.endswith(f"5.00 epochs of 4 steps{text if within else ''}")


def test_an_epoch_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="training.global_batch: 64 is more than the 15 samples of an epoch; give as"):
        lines("openmoji_diffusion.yaml", samples=15)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.duration=2ep", "training.duration: 2ep"),
        ("schedule={name: constant, warmup: 1ep}", "schedule.warmup: 1ep"),  # the rate would stay 0
        ("checkpoints.every=1ep", "checkpoints.every: 1ep"),
    ],
)
def test_a_duration_in_epochs_of_data_that_has_none_is_refused(override, key):
    recipe = load_config(ROOT / "yamls" / "openmoji_vae.yaml", [override, "run_name=2ep"], Recipe, [])
    with pytest.raises(ValueError, match=f"^{key}, and the data pictures is a stream without end"):
        lines("openmoji_vae.yaml", override)
    with pytest.raises(ValueError, match=f"^{key}, and"):
        describe_run(recipe, [])
