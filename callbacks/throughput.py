"""How fast training is, how much of the hardware that uses, and where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from composer import Callback, Event, Logger, State
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.utils import dist, model_eval_mode
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from callbacks.communication import CommunicationProfile
from callbacks.interval import at_intervals
from data.aliases import Duration  # noqa: F401 - read from the annotations below
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA

# What lies between two events of a step. DDP and FSDP communicate inside of the backward pass (FSDP in the forward
# pass too): what they do not hide there is part of its time.
SPANS = {
    "data": (Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER),
    "forward": (Event.BEFORE_FORWARD, Event.AFTER_LOSS),
    "backward": (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    # The average of the weights is updated at the same event, before callbacks see it; its own time is taken away.
    "optimizer": (Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
}
STARTS = {start: name for name, (start, _) in SPANS.items()}
ENDS = {end: name for name, (_, end) in SPANS.items()}
PARTS = (*SPANS, "ema")
PROFILED = 3  # steps of a profile


class Throughput(Callback):
    """Logs samples/s, samples/s a device, achieved TFLOP/s, MFU, and each part's share of a step's time.

    A step is timed from the wait for its data to the end of its optimizer step, so that validation, checkpoints and
    sampling between steps are left out. FLOPs of a sample are counted once by PyTorch's counter (a multiply-add is 2),
    forward and three times that in training. On a GPU the parts are timed by CUDA events that are read when they have
    passed: nothing waits for the device. Communication lies inside of the forward and backward parts, and only a
    profile tells it apart (see `CommunicationProfile`): the steps of a profile count for nothing else.
    """

    def __init__(self, task: nn.Module, *, window: int = 50, communication_every: Duration | None = None) -> None:
        """
        Args:
            window: steps of the running average.
            communication_every: interval between profiles of 3 steps that give the share of communication; null: none.
        """
        self.task = task
        self.profile_due = None if communication_every is None else at_intervals(communication_every)
        self.profile: CommunicationProfile | None = None
        self.profile_steps = 0  # still to be profiled
        self.communication: float | None = None  # share of a step's time
        self.steps: deque[tuple[int, float]] = deque(maxlen=window)  # (samples, seconds)
        self.parts: deque[dict[str, float]] = deque(maxlen=window)
        self.flops: float | None = None
        self.peak = 0.0
        self.began = 0.0
        self.samples = 0
        self.open: dict[str, Any] = {}
        self.marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self.pending: deque[dict[str, list[tuple[Any, Any]]]] = deque()

    def fit_start(self, state: State, logger: Logger) -> None:
        self.samples = state.timestamp.sample.value
        self.peak = float(get_gpu_flops_available(state)) if state.device.name == "gpu" else 0.0
        for algorithm in state.algorithms:
            if isinstance(algorithm, ScheduledEMA):
                algorithm.timer = lambda: self._timed("ema", state)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in ENDS and ENDS[event] in self.open:
            name = ENDS[event]
            self.marks[name].append((self.open.pop(name), _now(state)))
        super().run_event(event, state, logger)
        if event == Event.BEFORE_DATALOADER:
            self.began = time.perf_counter()
        if event in STARTS:
            self.open[STARTS[event]] = _now(state)

    @contextmanager
    def _timed(self, name: str, state: State) -> Iterator[None]:
        start = _now(state)
        yield
        self.marks[name].append((start, _now(state)))

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.profile_steps and self.profile is None:
            self.profile = CommunicationProfile(on_gpu=state.device.name == "gpu")

    def before_forward(self, state: State, logger: Logger) -> None:
        if self.flops is None:
            self.flops = flops_of_a_sample(self.task, state.batch)
            logger.log_hyperparameters({"forward_gflop_a_sample": self.flops / 1e9})

    def batch_end(self, state: State, logger: Logger) -> None:
        samples = state.timestamp.sample.value
        if self.profile is None:
            self.steps.append((samples - self.samples, time.perf_counter() - self.began))
            self.pending.append(dict(self.marks))
        self.samples = samples
        self.marks.clear()
        while self.pending and _passed(self.pending[0]):
            self.parts.append(_seconds_of(self.pending.popleft()))
        self._profile(state)
        if len(self.steps) == self.steps.maxlen:
            logger.log_metrics(self.figures())

    def _profile(self, state: State) -> None:
        """Goes on with a profile of communication that is under way, or plans one that is due."""
        if self.profile is not None:
            self.profile_steps -= 1
            if self.profile_steps == 0:
                self.communication = self.profile.stop()
                self.profile = None
        elif self.profile_due is not None and self.profile_due(state, Event.BATCH_END):
            if dist.get_world_size() == 1:
                self.communication = 0.0
            else:
                self.profile_steps = PROFILED

    def figures(self) -> dict[str, float]:
        """What is logged: averages over the window."""
        seconds = sum(step[1] for step in self.steps)
        rate = sum(step[0] for step in self.steps) / seconds
        a_device = rate / dist.get_world_size()
        figures = {
            "throughput/samples_per_sec": rate,
            "throughput/device/samples_per_sec": a_device,
            "throughput/batches_per_sec": len(self.steps) / seconds,
        }
        if self.flops:
            achieved = 3 * self.flops * a_device
            figures["throughput/device/tflops_per_sec"] = achieved / 1e12
            if self.peak:
                figures["throughput/device/mfu"] = achieved / self.peak
        step = seconds / len(self.steps)
        for name in PARTS:
            if self.parts:
                figures[f"time/share/{name}"] = sum(p.get(name, 0.0) for p in self.parts) / len(self.parts) / step
        if self.communication is not None:
            figures["time/share/communication"] = self.communication
        return figures


@torch.no_grad()
def flops_of_a_sample(task: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """FLOPs of the forward pass of one sample, by PyTorch's counter; the device's generators are left as they were.

    Args:
        task: called with a batch, unless its `forward_flops()` counts them itself.
        batch: dict of tensors whose first dimension is the sample.
    """
    counted = task.forward_flops()
    if counted is not None:
        return counted
    # Two samples, halved: a single one would be an edge case for contrastive losses and batch statistics.
    few = {name: tensor[:2] for name, tensor in batch.items()}
    devices = {tensor.device.index for tensor in few.values() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices), model_eval_mode(task), FlopCounterMode(display=False) as counter:
        task(few)
    return counter.get_total_flops() / len(next(iter(few.values())))


def _now(state: State) -> Any:
    if state.device.name != "gpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _passed(marks: dict[str, list[tuple[Any, Any]]]) -> bool:
    ends = [end for pairs in marks.values() for _, end in pairs]
    return all(isinstance(end, float) or end.query() for end in ends)


def _seconds_of(marks: dict[str, list[tuple[Any, Any]]]) -> dict[str, float]:
    """Seconds of each part of a step."""
    seconds = {name: sum(_seconds(*pair) for pair in pairs) for name, pairs in marks.items()}
    if "optimizer" in seconds:
        seconds["optimizer"] -= seconds.get("ema", 0.0)
    return seconds


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
