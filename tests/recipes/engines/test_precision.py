"""Number formats of a run: which one `auto` is, and that both engines train alike in 16 bits, also after a resume."""

import pytest
import torch

from recipes.engines import precision as precision_module
from recipes.engines.checkpoints.conversion import convert
from recipes.engines.lightning.run import LightningRun
from recipes.engines.parts import Place
from recipes.engines.precision import autocast, gradient_scaler, resolve
from recipes.training.callback import Callback
from recipes.training.checkpoint_names import KINDS
from tests.recipes.engines.recording import assert_bit_equal, record

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["auto", "fp32", "amp_bf16", "amp_fp16"])
def test_a_cpu_takes_every_precision(small_recipe, tmp_path, precision):
    place = Place.of(small_recipe(tmp_path, f"training.precision={precision}"), 1)
    assert place.precision == ("fp32" if precision == "auto" else precision)


@pytest.fixture
def cpu_with(tmp_path, monkeypatch):
    """A function that gives this machine a CPU with other instructions."""

    def become(flags):
        (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags : fpu avx2 {flags} sse2\n")
        monkeypatch.setattr(precision_module, "CPU_FACTS", tmp_path / "cpuinfo")

    return become


@pytest.mark.parametrize(
    ("flags", "fastest"),
    [("avx512_bf16", "amp_bf16"), ("amx_bf16", "amp_bf16"), ("bf16", "amp_bf16"), ("avx512f", "fp32")],
)
def test_fastest_depends_on_the_instructions(cpu_with, flags, fastest):
    cpu_with(flags)
    assert resolve("fastest", use_gpu=False) == fastest and resolve("fastest", use_gpu=True) == "amp_bf16"
    assert resolve("auto", use_gpu=False) == "fp32"


def test_a_machine_that_does_not_say_has_no_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(precision_module, "CPU_FACTS", tmp_path / "none")
    assert resolve("fastest", use_gpu=False) == "fp32"


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)]
)
def test_autocast(precision, dtype):
    matrix = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16), autocast(CPU, precision):
        assert (matrix @ matrix).dtype == dtype
    scaler = gradient_scaler(CPU, precision)
    assert (scaler is not None) == (precision == "amp_fp16")
    assert scaler is None or scaler.is_enabled()


def scaler_of(run):
    return run.scaler if isinstance(run, LightningRun) else run._state.scaler


class Scale(Callback):
    """The scale of the gradients is 4 at first."""

    def begin(self, run):
        if not run.clock.batch:
            scaler_of(run).load_state_dict(scaler_of(run).state_dict() | {"scale": 4.0})

    def end(self, run):
        self.found = scaler_of(run).state_dict()


class Overflow(Scale):
    """All gradients are infinite, whatever the scale."""

    def begin(self, run):
        super().begin(run)
        self.batches = 0

    def after_backward(self, run):
        for parameter in run.task.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.inf)

    def step_end(self, run):
        self.batches = run.clock.batch


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_run_that_the_scaler_skips_for_ever_ends(quick_recipe, tmp_path, engine):
    """At scales of 4 and 2 the scaler alone skips; at 1, and below it, each batch counts."""
    overflow = Overflow()
    changes = ["training={precision: amp_fp16, duration: 9ba, nonfinite_limit: 2}", "evals.val=null"]
    with pytest.raises(ValueError, match="2 batches in a row were not finite, since batch 3 .loss [01]"):
        record(engine, quick_recipe(tmp_path, *changes), overflow)
    assert overflow.batches == 3  # the guard, before it, ended the fourth


@pytest.mark.parametrize(("engine", "other"), [("composer", "lightning"), ("lightning", "composer")])
def test_the_scale_goes_on_under_the_other_engine(quick_recipe, tmp_path, engine, other):
    changes = ["training={precision: amp_fp16, duration: 2ba}", "evals.val=null", "checkpoints.autoresume=true"]
    record(engine, quick_recipe(tmp_path, *changes, f"training.engine={engine}"), Scale())
    link = KINDS[engine].link
    convert(tmp_path / "checkpoints" / link, other)
    resumed = Scale()
    changes += [f"training.engine={other}", "training.duration=4ba"]
    record(other, quick_recipe(tmp_path, *changes), resumed)
    assert resumed.found["scale"] == 4.0 and resumed.found["_growth_tracker"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_both_engines_train_alike(quick_recipe, tmp_path, precision):
    changes = [
        f"training={{precision: {precision}, duration: 6ba, microbatch: 3, eval_every: 3ba}}",
        "checkpoints={every: 3ba, keep: -1}",
        "algorithms.low_precision_norms={name: low_precision_norms, modules: denoiser}",
        "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 2ba}",
    ]
    found = {
        engine: record(engine, quick_recipe(tmp_path / engine, *changes, f"training.engine={engine}"))
        for engine in ("composer", "lightning")
    }
    assert_bit_equal(found["composer"], found["lightning"])
    plain = record("composer", quick_recipe(tmp_path / "fp32", "training={duration: 6ba, microbatch: 3}"))
    # At first the output of the network is 0 in every format.
    assert plain.losses[-1] != found["composer"].losses[-1] == pytest.approx(plain.losses[-1], rel=0.02)
    for engine, run in found.items():
        (middle,) = (tmp_path / engine / "checkpoints").glob("*-ba3[.-]*")
        resumed = record(engine, quick_recipe(tmp_path / "again", *changes, f"checkpoints.load_path={middle}"))
        assert len(resumed.losses) == 3
        assert_bit_equal(run, resumed)
