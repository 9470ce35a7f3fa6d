"""What benchmarks that time the GPU must say first: whether float32 products and convolutions are computed in TF32."""

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import powersgd_cost
from benchmarks.common import reporting, timing
from tests.pretended_gpu import PretendedGPU

ROOT = Path(__file__).resolve().parents[2]
SAYS = (
    "training_device(",
    "allow_tf32 =",  # `precompute/encoding/job.py` turns it off, and so do measurements of the encoders
    "build_trainer(",  # Composer turns it on
)
# They know of GPUs, and time nothing that they run themselves.
OTHERS = {"gpu.py", "soak.py", "common/reporting.py", "common/steady.py", "common/training.py"}
OTHERS |= {"gpu_run/context.py", "gpu_run/operators.py", "gpu_run/preload.py", "gpu_run/subjects.py"}
OTHERS |= {"gpu_run/encode_job.py"}  # the job says it
OTHERS |= {"stub_gpu/build.py", "stub_gpu/use.py"}


def test_every_benchmark_on_a_gpu_says_whether_it_uses_tf32():
    folder = ROOT / "benchmarks"
    texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    on_gpu = {name for name, text in texts.items() if "cuda" in text or "training_device" in text}
    silent = {name for name in on_gpu if not any(word in texts[name] for word in SAYS)}
    assert {"adam16.py", "powersgd_cost.py", "gpu_run/device.py", "gpu_run/encoding.py"} <= on_gpu - silent
    assert silent <= OTHERS, f"{silent - OTHERS}: take the device from benchmarks.common.timing.training_device"


@pytest.fixture
def no_tf32():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_the_device_computes_as_in_training(no_tf32):
    assert timing.training_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


def test_compression_is_timed_as_it_computes_in_training(no_tf32, monkeypatch, tmp_path):
    """Composer turns TF32 on, and the products of PowerSGD are of float32 numbers."""

    def seen(works, rounds, gpu):
        assert torch.backends.cuda.matmul.allow_tf32
        whole = {"compress and finish": 8.0, "backward pass": 32.0, "by Householder reflections": 3.0}
        return dict.fromkeys(works, 1.0) | whole

    monkeypatch.setattr(powersgd_cost, "times", seen)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    (row,) = powersgd_cost.main(["--widths", "64", "--ranks", "16"])
    named = ("other", "compress and finish", "Householder / Cholesky", "backward pass", "relative to backward pass")
    assert [row[name] for name in named] == [3e3, 8e3, 3.0, 32e3, 0.25]


def test_alternatives_take_turns_after_two_rounds_that_do_not_count(monkeypatch):
    now, order = [0.0], []

    def lasting(name, seconds):
        left = iter(seconds)

        def work():
            order.append(name)
            now[0] += next(left)

        return work

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    works = {"a": lasting("a", [9, 9, 1, 2, 6]), "b": lasting("b", [0, 0, 5, 4, 3])}
    assert timing.times(works, 3, gpu=False) == {"a": 2, "b": 4}
    assert order == ["a", "b"] * 5


@pytest.mark.parametrize(("launch", "work"), [(1e-4, 2e-5), (1e-4, 1e-4), (1e-5, 3e-3)])
def test_time_of_the_gpu_is_without_that_of_launches(launch, work, monkeypatch):
    gpu = PretendedGPU()
    gpu.install(monkeypatch, timing)
    step = partial(gpu.run, launch, work)
    assert timing.gpu_seconds(step) == pytest.approx(work, rel=1e-6)
    assert timing.milliseconds(step, 0.0, torch.device("cuda")) == pytest.approx(1e3 * work, rel=1e-6)
