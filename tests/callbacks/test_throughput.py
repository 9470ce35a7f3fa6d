"""Throughput: FLOPs as published, averages over steps only, shares that add up."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # noqa: F401 - imported later, inside of the meta device's mode, it fails
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from callbacks.communication import communication, covered
from callbacks.throughput import Throughput, flops_of_a_sample
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.engines.composer.model import ComposerTask
from recipes.models.latent_diffusion.unet import unet
from recipes.models.task import Task


class Layers(Task):
    """Two products of 8 x 8 with a vector, and a draw of random numbers."""

    eval_names = ["loss"]

    def __init__(self, pause=0.0):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.pause = pause
        self.draws = []

    def forward(self, batch):
        time.sleep(self.pause)
        noise = torch.rand(())
        if torch.is_grad_enabled():
            self.draws.append(noise.item())
        return {"total": self.layers(batch["x"]).square().mean()}

    def evaluate(self, batch):
        time.sleep(0.3)
        return {"loss": self.layers(batch["x"]).square().mean(1)}


def run(task, callbacks, batches=8, algorithms=()):
    data = [{"x": torch.full((8,), float(i))} for i in range(4 * batches)]
    logger = InMemoryLogger()
    trainer = Trainer(
        model=ComposerTask(task),
        train_dataloader=DataLoader(data, batch_size=4),
        eval_dataloader=DataLoader(data[:4], batch_size=4),
        eval_interval="2ba",
        max_duration=f"{batches}ba",
        optimizers=torch.optim.SGD(task.parameters(), lr=0.01),
        algorithms=list(algorithms),
        callbacks=callbacks,
        loggers=[logger],
        progress_bar=False,
        seed=1,
    )
    trainer.fit()
    return {name: values[-1][1] for name, values in logger.data.items() if values}


@pytest.mark.parametrize(("side", "gflop"), [(32, 181), (64, 804)])
def test_the_counter_gives_the_published_flops_of_the_unet(side, gflop):
    with torch.device("meta"):
        network = unet(
            channels=[320, 640, 1280, 1280], attention=[True, True, True, False], heads=[5, 10, 20, 20], text_width=1024
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.empty(1, 4, side, side), torch.zeros(1, dtype=torch.long), torch.empty(1, 77, 1024))
    assert round(counter.get_total_flops() / 1e9) == gflop


def test_flops_of_a_sample_are_those_of_its_products():
    assert flops_of_a_sample(Layers(), {"x": torch.ones(5, 8)}) == 2 * (2 * 8 * 8)


def test_counting_leaves_random_numbers_and_weights_as_they_are():
    plain, counted = Layers(), Layers()
    counted.load_state_dict(plain.state_dict())
    run(plain, [])
    run(counted, [Throughput(counted, window=2)])
    assert plain.draws == counted.draws
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), counted.parameters(), strict=True))


class Slow(Callback):
    def batch_checkpoint(self, state, logger):
        time.sleep(0.3)


def test_validation_and_checkpoints_are_left_out_and_parts_add_up():
    task = Layers(pause=0.05)
    figures = run(task, [Throughput(task, window=4), Slow()])
    # 4 samples in 0.05 s and the little that Composer does; with what lies between steps it would be below 14/s.
    assert 15 < figures["throughput/samples_per_sec"] <= 80
    assert figures["throughput/samples_per_sec"] == pytest.approx(figures["throughput/device/samples_per_sec"])
    flops = 3 * 2 * (2 * 8 * 8) * figures["throughput/samples_per_sec"]
    assert figures["throughput/device/tflops_per_sec"] == pytest.approx(flops / 1e12)
    shares = {name: figures[f"time/share/{name}"] for name in ("data", "forward", "backward", "optimizer", "ema")}
    assert shares["forward"] > 0.5 and shares["ema"] == 0.0
    assert 0.5 < sum(shares.values()) <= 1.01
    assert "time/share/communication" not in figures


class SlowEMA(ScheduledEMA):
    def _new_average(self, state):
        average = super()._new_average(state)
        update = average.update
        average.update = lambda keep: (time.sleep(0.1), update(keep))
        return average


@pytest.mark.parametrize("start", [None, "7ba"])
def test_the_average_has_its_own_share(start):
    task = Layers(pause=0.05)
    figures = run(task, [Throughput(task, window=4)], algorithms=[SlowEMA(decay=0.9, start=start)])
    if start is None:
        assert 0.5 < figures["time/share/ema"] < 0.7
        assert figures["time/share/optimizer"] < 0.2  # without the average's part
    else:  # begun at the seventh batch, one update: of the last four steps one is slow
        assert 0.2 < figures["time/share/ema"] < 0.5


def test_one_rank_has_nothing_to_say():
    task = Layers()
    figures = run(task, [Throughput(task, window=4, communication_every="2ba")])
    assert figures["time/share/communication"] == 0.0


def test_exposed_communication():
    """On a GPU, what of NCCL's kernels no other kernel covers; on a CPU all of gloo's time, counted once."""

    def event(name, begin, end, device):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=begin, end=end), device_type=device)

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
def test_the_union_of_intervals(intervals):
    assert covered(intervals) == len({unit for begin, end in intervals for unit in range(begin, end)})
