"""Run by test_operators.py in a process that takes the stub for a GPU: each small workload by both ways."""

import json

import torch

from benchmarks.common.attention_calls import WAYS, attention_by
from benchmarks.operators import WORKLOADS, Setting
from benchmarks.stub_gpu.use import Counts


def main():
    counts, setting = Counts(), Setting(torch.device("cuda"), small=True)
    for name, make in WORKLOADS.items():
        work = make(setting)
        for way in WAYS:
            calls = []
            with torch.no_grad(), attention_by(way, calls):
                before = counts.launches
                result = work()
            row = name, way, str(result.dtype), str(result.device), len(calls), counts.launches - before
            print("row:", json.dumps(row))


if __name__ == "__main__":
    main()
