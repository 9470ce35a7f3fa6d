"""Peaks of GPUs by their names as PyTorch gives them, and the number format that blocks compute in."""

import pytest
import torch

from callbacks.peak_flops import PEAKS, number_format_of, peak_flops
from callbacks.throughput import Throughput
from recipes.algorithms.sixteen_bit.block_scaling import scale_branch
from recipes.models.task import Task
from tests.recipes.training.fake_run import FakeRun


@pytest.mark.parametrize(
    ("gpu", "number_format", "tera"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "fp32", 67),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L4", "bf16", 121),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100S-PCIE-32GB", "fp16", 130),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "tf32", 35.6),
        ("NVIDIA RTX A6000", "fp16", 154.8),
        ("NVIDIA B200", "bf16", 2250),
    ],
)
def test_known_gpus(gpu, number_format, tera):
    assert peak_flops(gpu, number_format) == tera * 1e12


@pytest.mark.parametrize(
    ("gpu", "number_format"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),  # it has no such products
        ("Tesla T4", "tf32"),
        ("NVIDIA H200 MIG 1g.18gb", "bf16"),  # a part of a GPU
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),  # a faster GPU, and a slower one
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA A1000", "bf16"),
        ("AMD Instinct MI300X", "bf16"),
        ("", "fp32"),
    ],
)
def test_what_is_not_known_is_not_guessed(gpu, number_format):
    assert peak_flops(gpu, number_format) is None


def test_shorter_formats_are_not_slower():
    for name, peaks in PEAKS.items():
        rates = [peaks[f] for f in ("fp32", "tf32", "fp16") if f in peaks]
        assert rates == sorted(rates), name
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], name


class Blocks(Task):
    def __init__(self):
        super().__init__()
        self.branch = torch.nn.Linear(2, 2)


def test_the_format_that_blocks_compute_in(monkeypatch):
    task = Blocks()
    assert [number_format_of(task, precision) for precision in ("amp_bf16", "amp_fp16")] == ["bf16", "fp16"]
    for allowed, expected in (("highest", "fp32"), ("high", "tf32")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda allowed=allowed: allowed)
        assert number_format_of(task, "fp32") == expected
    scale_branch(task.branch, torch.ones(()), torch.zeros((), dtype=torch.int64))
    assert number_format_of(task, "fp32") == "fp16"  # by resblock_grad_scaling


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA Unheard-of"])
def test_utilization_is_logged_where_the_peak_is_known(monkeypatch, capsys, gpu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    run = FakeRun(Blocks(), precision="amp_bf16")
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
