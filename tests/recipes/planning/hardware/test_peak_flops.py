"""Peaks of GPUs by their names as PyTorch gives them."""

import pytest

from recipes.planning.hardware.peak_flops import PEAKS, peak_flops


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
