"""Run by test_compile.py in a process that takes the stub for a GPU: trains with CUDA graphs and without."""

import json

import torch
import torch._inductor.config

from benchmarks.stub_gpu.use import Counts, compute_decisions_on_host
from recipes.algorithms.graphs.cuda_graphs import CudaGraphs
from recipes.algorithms.microbatch.search import MicrobatchSearch
from recipes.algorithms.modules.compile import Compile
from recipes.training.lever import Lever
from tests.recipes.algorithms.modules.test_compile import Deep, train


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
        for name in ("none", "compile", "cuda_graphs", "both"):
            torch._dynamo.reset()
            launches, task = Launches(), Deep()
            levers = [Compile(task, mode="reduce-overhead")] if name == "compile" else []
            levers += [Compile(task)] if name == "both" else []
            levers += [CudaGraphs(task)] if name in ("cuda_graphs", "both") else []
            train(launches, *levers, task=task, device="gpu", microbatch=microbatch, precision="fp32")
            kept = len(levers[-1].gradients.copies) if levers else 0
            print("row:", json.dumps([microbatch, name, launches.of_batches[-1], kept, launches.counts.strays]))
    task = Deep()
    graphs = CudaGraphs(task)
    search = MicrobatchSearch(task, 8, compiled=[graphs])  # which trains without graphs first
    train(search, graphs, task=task, device="gpu", precision="fp32")
    captured = sum(forward.graphs.backward_graph is not None for forward in graphs.forwards)
    print("searched:", json.dumps([search.settled, captured]))


if __name__ == "__main__":
    main()
