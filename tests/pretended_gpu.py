"""A GPU whose kernels take given times, for tests of what measures them."""

import torch

from recipes.models.kernels.devices import MOST_CYCLES


class PretendedGPU:
    """A GPU, and the host's clock: launches take the host some time, and the GPU works on them one after the other."""

    def __init__(self):
        self.host = self.free = 0.0  # the host's time, and when the GPU has done all that it was given

    def run(self, launch, work):
        """A step: seconds that its launches take the host, and its kernels the GPU."""
        self.host += launch
        self.free = max(self.free, self.host) + work

    def install(self, monkeypatch, module):
        """Let PyTorch use it, and a module that imports `time` its clock."""
        for name in ("_sleep", "synchronize", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.host)

    def _sleep(self, cycles):
        self.free = max(self.free, self.host) + cycles / MOST_CYCLES

    def synchronize(self):
        self.host = max(self.host, self.free)

    def Event(self, enable_timing):
        return PretendedEvent(self)


class PretendedEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.time = max(self.gpu.free, self.gpu.host)

    def synchronize(self):
        self.gpu.synchronize()

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)
