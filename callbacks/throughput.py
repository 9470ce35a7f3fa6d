"""How fast training is, how much of the hardware it uses, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from callbacks.communication import CommunicationProfile
from callbacks.flops import flops_per_sample
from callbacks.number_format import number_format_of
from callbacks.step_timer import StepTimer
from data.aliases import Duration
from data.ranges import check_least
from data.system.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.models.task import Task
from recipes.planning.hardware.peak_flops import peak_flops
from recipes.training.callback import Callback
from recipes.training.clock import Interval
from recipes.training.ranks import world_size
from recipes.training.run import Run

# The parts of a step whose time is measured. DDP and FSDP communicate during the backward pass (FSDP in the forward
# pass too): the part of that time which computation does not hide belongs to these passes.
PARTS = ("data", "forward", "backward", "optimizer", "ema")
PROFILED = 3  # steps per profile


class Throughput(Callback):
    """Logs samples/s, samples/s per device, achieved TFLOP/s, MFU, and each part's share of a step's time.

    A step is timed from the wait for its data to the end of its optimizer step, so that validation, checkpoints and
    sampling between steps are left out. The FLOPs of the forward pass are counted once on the meta device by PyTorch's
    counter (a multiply-add counts as 2); training takes three times as many. On a GPU the parts are timed by CUDA
    events that are read after they have passed, so that nothing waits for the device. Communication is part of the
    forward and backward passes, and only a profile can tell it apart (see `CommunicationProfile`); profiled steps count
    for nothing else.
    """

    alone = True

    def __init__(
        self,
        task: Task,
        blank: Callable[[], Task],
        average: ScheduledEMA | None,
        *,
        window: int = 50,
        communication_every: Duration | None = None,
    ) -> None:
        """`blank` makes the task anew on the meta device, where FLOPs are counted.

        Args:
            window: number of steps over which averages are taken.
            communication_every: interval between profiles of 3 steps that give the share of communication; null: none.
        """
        check_least("throughput", 1, window=window)
        self.task = task
        self.blank = blank
        self.counted = False
        self.average = average
        self.window = window
        every = communication_every
        self.profile_due = None if every is None else Interval(every, "throughput: communication_every")
        self.profile: CommunicationProfile | None = None
        self.profile_steps = 0  # still to be profiled
        self.communication: float | None = None  # share of a step's time
        self.timer = StepTimer(window, on_gpu=False)
        self.flops: float | None = None  # of the forward pass, per sample
        self.peak: float | None = None  # FLOP/s of the device
        self.samples = 0

    def begin(self, run: Run) -> None:
        self.samples = run.clock.sample
        self.timer = StepTimer(self.window, run.on_gpu)
        if self.average is not None:
            self.average.watch(partial(self.timer.part, "ema"))
        if run.on_gpu:
            gpu, number_format = torch.cuda.get_device_name(run.device), number_format_of(self.task, run.precision)
            self.peak = peak_flops(gpu, number_format)
            if self.peak is None:
                log.warning(
                    f"throughput: the peak FLOP/s of {gpu} in {number_format} are not known, so MFU is not logged; add "
                    "them to recipes/planning/hardware/peak_flops.py"
                )

    def before_data(self, run: Run) -> None:
        self.timer.begin_step()
        self.timer.begin("data")

    def batch_start(self, run: Run) -> None:
        self.timer.end("data")
        if self.profile_steps and self.profile is None:
            self.profile = CommunicationProfile(run.on_gpu)

    def before_forward(self, run: Run) -> None:
        if not self.counted:
            self._count(run)
        self.timer.begin("forward")

    def _count(self, run: Run) -> None:
        """Count the FLOPs of a sample, which needs a batch."""
        self.counted = True
        self.flops = self.task.forward_flops()
        if self.flops is None:
            try:
                self.flops = flops_per_sample(self.blank, run.batch)
            except RuntimeError as error:
                log.warning(
                    f"throughput: TFLOP/s and MFU are not logged, because {type(self.task).__name__} cannot be called "
                    f"on the meta device ({str(error).splitlines()[0]}); define its forward_flops"
                )
                return
        run.log_settings({"forward_gflop_per_sample": self.flops / 1e9})

    def after_forward(self, run: Run) -> None:
        self.timer.end("forward")

    def before_backward(self, run: Run) -> None:
        self.timer.begin("backward")

    def after_backward(self, run: Run) -> None:
        self.timer.end("backward")

    def gradients_ready(self, run: Run) -> None:
        self.timer.begin("optimizer")

    def step_end(self, run: Run) -> None:
        self.timer.end("optimizer")
        samples, self.samples = run.clock.sample - self.samples, run.clock.sample
        self.timer.end_step(samples, counts=self.profile is None)
        self._profile(run)
        if self.timer.full:
            run.log(self.figures())

    def epoch_end(self, run: Run) -> None:
        if self.profile is None:
            self._plan_profile(run)

    def _profile(self, run: Run) -> None:
        """Continue a profile of communication that is under way, or plan one that is due."""
        if self.profile is None:
            self._plan_profile(run)
            return
        self.profile_steps -= 1
        if self.profile_steps == 0:
            self.communication = self.profile.stop()
            self.profile = None

    def _plan_profile(self, run: Run) -> None:
        """Let a profile begin with the next step, if one is due at the end of a step or of an epoch."""
        if self.profile_due is not None and self.profile_due(run.clock):
            if world_size() == 1:
                self.communication = 0.0
            else:
                self.profile_steps = PROFILED

    def figures(self) -> dict[str, float]:
        """What is logged: averages over the window."""
        rate = self.timer.samples_per_second()
        per_device = rate / world_size()
        figures = {
            "throughput/samples_per_sec": rate,
            "throughput/device/samples_per_sec": per_device,
            "throughput/batches_per_sec": self.timer.steps_per_second(),
        }
        if self.flops:
            achieved = 3 * self.flops * per_device
            figures["throughput/device/tflops_per_sec"] = achieved / 1e12
            if self.peak:
                figures["throughput/device/mfu"] = achieved / self.peak
        shares = {part: self.timer.share(part) for part in PARTS}
        if shares["ema"]:
            # The average is updated at the same moment as callbacks act, but before them.
            shares["optimizer"] -= shares["ema"]
        figures |= {f"time/share/{part}": share for part, share in shares.items() if share is not None}
        if self.communication is not None:
            figures["time/share/communication"] = self.communication
        return figures
