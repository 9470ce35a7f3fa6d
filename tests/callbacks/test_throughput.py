"""Throughput: FLOPs as published, averages over steps only, exact shares of a time that the test sets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from callbacks import step_timer, throughput
from callbacks.communication import communication, covered
from callbacks.step_timer import StepTimer
from callbacks.throughput import Throughput
from recipes.models.task import Task
from recipes.training.callback import Callback
from recipes.training.lever import Lever
from tests.recipes.training.fake_run import FakeRun, train

FLOPS = 2 * (2 * 8 * 8)  # of `Layers`, per sample


@pytest.fixture
def now(monkeypatch):
    """The time, which only the test lets pass."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(step_timer, "perf_counter", lambda: now.seconds)
    return now


class Layers(Task):
    """Two products of 8 x 8 with a vector, and a draw of random numbers."""

    eval_names = ("loss",)

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.draws = []

    def forward(self, batch):
        noise = torch.rand(())
        if self.training:
            self.draws.append(noise.item())
        return {"total": self.layers(batch["x"]).square().mean()}

    def evaluate(self, batch):
        return {"loss": self.layers(batch["x"]).square().mean(1)}


def blank():
    with torch.device("meta"):
        return Layers()


def passing(now, seconds):
    """A callback that lets time pass: moment -> seconds."""

    def lets_pass(count):
        def moment(self, run):
            now.seconds += count

        return moment

    return type("Passing", (Callback,), {name: lets_pass(count) for name, count in seconds.items()})()


def run(task, callbacks, batches=8, levers=(), microbatch=None, trained=0, **options):
    torch.manual_seed(1)
    data = [{"x": torch.full((4, 8), float(i))} for i in range(5)]
    fake = FakeRun(task, f"{batches}ba")
    fake.clock = replace(fake.clock, sample=trained)  # before the run was resumed
    train(fake, data, callbacks, levers, microbatch, {"val": data[:1]}, eval_every=2, **options)
    return fake


def test_counting_leaves_random_numbers_and_weights_as_they_are():
    plain, counted = Layers(), Layers()
    counted.load_state_dict(plain.state_dict())
    run(plain, [])
    run(counted, [Throughput(counted, blank, None, window=2)])
    assert plain.draws == counted.draws
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), counted.parameters(), strict=True))


def test_a_task_that_cannot_be_counted_is_timed_all_the_same(capsys):
    task = Layers()
    task.forward = lambda batch: {"total": task.layers(batch["x"]).mean() * float(batch["x"].amax() >= 0)}
    fake = run(task, [Throughput(task, lambda: task, None, window=2)])
    assert capsys.readouterr().out.count("throughput: TFLOP/s and MFU are not logged, because Layers cannot") == 1
    assert fake.settings == {} and not fake.values("throughput/device/tflops_per_sec")
    assert fake.values("throughput/samples_per_sec")


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [0, 400])
def test_steps_alone_are_timed_and_parts_have_their_shares(now, trained):
    """The time that passes at a moment lies before what a callback further down the list does at it."""
    task = Layers()
    measured = {
        "batch_start": 1,  # the data
        "before_passes": 2,
        "after_forward": 4,  # of each of two microbatches
        "after_backward": 8,
        "gradients_ready": 16,  # other callbacks, levers
        "step_end": 32,  # the optimizer
    }
    outside = {"begin": 1000, "eval_start": 1000, "eval_after_forward": 1000, "eval_end": 1000, "epoch_end": 1000}
    callbacks = [passing(now, measured | outside), Throughput(task, blank, None, window=4)]
    fake = run(task, callbacks, microbatch=2, trained=trained)
    seconds = 1 + 2 + 2 * 4 + 2 * 8 + 16 + 32
    assert fake.settings == {"forward_gflop_per_sample": FLOPS / 1e9}
    assert [batch for batch, _ in fake.logged] == [4, 5, 6, 7, 8]
    assert all(figures == fake.logged[0][1] for _, figures in fake.logged)
    assert fake.logged[0][1] == pytest.approx(
        {
            "throughput/samples_per_sec": 4 / seconds,
            "throughput/device/samples_per_sec": 4 / seconds,
            "throughput/batches_per_sec": 1 / seconds,
            "throughput/device/tflops_per_sec": 3 * FLOPS * 4 / seconds / 1e12,
            "time/share/data": 1 / seconds,
            "time/share/forward": 8 / seconds,
            "time/share/backward": 16 / seconds,
            "time/share/optimizer": 32 / seconds,
            "time/share/ema": 0.0,
        }
    )


class Average(Lever):
    """A stand-in of ScheduledEMA, whose updates take 16 seconds."""

    def __init__(self, now, start):
        self.now, self.start = now, start
        self.watchers = []

    def watch(self, context):
        self.watchers.append(context)

    def step_end(self, run):
        if run.clock.batch >= self.start:
            (watcher,) = self.watchers
            with watcher():
                self.now.seconds += 16


@pytest.mark.parametrize(("start", "updates"), [(1, 4), (8, 1), (99, 0)])
def test_the_average_has_its_own_share(now, start, updates):
    task, average = Layers(), Average(now, start)
    callbacks = [passing(now, {"after_forward": 4, "step_end": 2}), Throughput(task, blank, average, window=4)]
    fake = run(task, callbacks, levers=[average])
    seconds = 4 * (4 + 2) + updates * 16  # of the last four steps
    figures = fake.logged[-1][1]
    assert figures["time/share/ema"] == pytest.approx(updates * 16 / seconds)
    assert figures["time/share/optimizer"] == pytest.approx(4 * 2 / seconds)
    assert figures["time/share/forward"] == pytest.approx(4 * 4 / seconds)


def test_a_window_forgets():
    timer = StepTimer(window=2, on_gpu=False)
    assert timer.share("forward") is None and not timer.full
    for samples in (1000, 4, 8):
        timer.begin_step()
        timer.end("forward")  # nothing has begun in this step
        timer.begin("forward")
        timer.end_step(samples)
    assert timer.full and timer.samples_per_second() == pytest.approx(6 * timer.steps_per_second())
    assert timer.share("forward") == 0.0


class Event:
    """A CUDA event that passes when the test says so."""

    passed = False
    times = iter(range(0, 10_000_000, 250))

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = next(self.times)

    def query(self):
        return Event.passed

    def elapsed_time(self, end):
        assert Event.passed, "reading it would wait for the device"
        return end.time - self.time  # milliseconds


def test_events_of_a_device_are_read_when_they_have_passed(now, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(window=4, on_gpu=True)

    def step():
        timer.begin_step()
        with timer.part("forward"):
            pass
        now.seconds += 1
        timer.end_step(samples=4)

    step()
    step()
    assert timer.share("forward") is None
    monkeypatch.setattr(Event, "passed", True)
    step()
    assert timer.share("forward") == 0.25


# --- communication ---------------------------------------------------------------------------------------------------


def test_one_rank_has_nothing_to_say():
    task = Layers()
    fake = run(task, [Throughput(task, blank, None, window=4, communication_every="2ba")])
    assert fake.logged[-1][1]["time/share/communication"] == 0.0


@pytest.fixture
def profiles(now, monkeypatch):
    """When profiles began, on the first of two ranks; to begin and to end one takes long."""
    profiles = []

    class Profile:
        def __init__(self, on_gpu):
            profiles.append(now.seconds)
            now.seconds += 500

        def stop(self):
            now.seconds += 500
            return 0.125

    monkeypatch.setattr(throughput, "CommunicationProfile", Profile)
    monkeypatch.setattr(throughput, "world_size", lambda: 2)
    return profiles


def test_profiled_steps_count_for_nothing_else(now, profiles):
    task = Layers()
    callbacks = [passing(now, {"step_end": 2}), Throughput(task, blank, None, window=2, communication_every="6ba")]
    fake = run(task, callbacks, batches=11)
    assert len(profiles) == 1  # of the steps 7, 8 and 9
    shares = fake.values("time/share/communication")
    assert min(shares) == 9 and set(shares.values()) == {0.125}
    assert set(fake.values("throughput/samples_per_sec").values()) == {2.0}
    assert set(fake.values("throughput/device/samples_per_sec").values()) == {1.0}


def test_profiles_of_each_epoch(now, profiles):
    """An epoch ends after the end of its last step."""
    task = Layers()
    callbacks = [passing(now, {"step_end": 2}), Throughput(task, blank, None, window=2, communication_every="1ep")]
    fake = run(task, callbacks, batches=14)
    assert len(profiles) == 2  # of the steps 6 to 8 and 11 to 13
    assert min(fake.values("time/share/communication")) == 8


def test_exposed_communication():
    """On a GPU, what of NCCL's kernels no other kernel covers; on a CPU all of gloo's time, counted once."""

    def event(name, begin, end, device):
        values = {"name": name, "start_ns": begin, "end_ns": end, "device_type": device}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    gpu, cpu = DeviceType.CUDA, DeviceType.CPU
    events = [
        event("ncclDevKernel_ReduceScatter", 0, 10, gpu),
        event("ncclDevKernel_AllGather", 5, 20, gpu),
        event("gemm", 8, 12, gpu),
        event("norm", 11, 15, gpu),
        event("gemm", 30, 40, gpu),
        event("gloo:all_reduce", 0, 4, cpu),
        event("gloo:all_reduce", 2, 6, cpu),
        event("aten::mm", 0, 100, cpu),
    ]
    assert communication(events, on_gpu=True) == 20 - (15 - 8)
    assert communication(events, on_gpu=False) == 6


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: tuple(sorted(pair)))))
def test_the_union_of_spans(spans):
    assert covered(spans) == len({unit for begin, end in spans for unit in range(begin, end)})


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA Unheard-of"])
def test_utilization_is_logged_where_the_peak_is_known(monkeypatch, capsys, gpu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    run = FakeRun(Task(), precision="amp_bf16")
    run.device = torch.device("cuda", 0)
    callback = Throughput(run.task, lambda: run.task, None, window=1)
    callback.begin(run)
    assert callback.peak == (989.4e12 if gpu == "NVIDIA H200" else None)
    message = "throughput: the peak FLOP/s of NVIDIA Unheard-of in bf16 are not known, so MFU is not logged; add them"
    assert (message in capsys.readouterr().out) == (callback.peak is None)
    callback.flops = 1e12
    callback.timer._steps.append((8, 2.0))
    figures = callback.figures()
    assert figures["throughput/device/tflops_per_sec"] == 3 * 4
    assert figures.get("throughput/device/mfu") == (pytest.approx(12 / 989.4) if callback.peak else None)
