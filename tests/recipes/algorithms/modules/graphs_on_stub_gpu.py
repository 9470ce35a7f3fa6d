"""Run by test_compile.py in a process that takes the stub for a GPU: trains with CUDA graphs and without."""

import json

import torch
import torch._inductor.config

from benchmarks.stub_gpu.use import Counts, compute_decisions_on_host
from recipes.algorithms.modules.compile import Compile
from recipes.training.lever import Lever
from tests.recipes.algorithms.modules.test_compile import train


class Launches(Lever):
    """Launches of kernels and of graphs from the first forward pass of a batch to the end of its last backward pass."""

    def __init__(self):
        self.counts, self.of_batches = Counts(), []

    def before_passes(self, run):
        self.began = self.counts.launches

    def unscale_gradients(self, run):
        self.of_batches.append(self.counts.launches - self.began)


def main():
    torch._inductor.config.triton.autotune_pointwise = False  # several versions of a kernel would be timed
    compute_decisions_on_host()
    for microbatch in (8, 2):  # of 8 samples
        for levers in ([], [Compile(None, mode="reduce-overhead")]):
            torch._dynamo.reset()
            launches = Launches()
            train(launches, *levers, device="gpu", microbatch=microbatch, precision="fp32")
            kept = sum(len(lever.gradients) for lever in levers)
            print("row:", json.dumps([microbatch, len(levers), launches.of_batches[-1], kept]))


if __name__ == "__main__":
    main()
