"""Run by test_block_all_reduce.py in a process that takes the stub for a GPU: kernels that copy a block's gradients."""

import torch
from torch import nn

from benchmarks.stub_gpu.use import Counts
from recipes.algorithms.gradients.block_all_reduce import Bucket


def main():
    counts = Counts()
    layers = nn.Sequential(*(nn.Conv2d(32, 32, 3) for _ in range(30))).to("cuda", memory_format=torch.channels_last)
    parameters = list(layers.parameters())
    for wire in (torch.float32, torch.bfloat16):
        bucket = Bucket(parameters, wire, 2, complete=lambda: None)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        gradients, before = [p.grad for p in parameters], counts.launches
        torch._foreach_copy_(bucket.views, gradients)
        torch._foreach_copy_(gradients, bucket.views)
        print("row:", wire, len(parameters), counts.launches - before)


if __name__ == "__main__":
    main()
