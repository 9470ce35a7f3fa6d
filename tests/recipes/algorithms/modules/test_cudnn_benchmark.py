"""cuDNN measures on GPUs alone."""

import torch
from torch import nn

from recipes.algorithms.modules.cudnn_benchmark import CudnnBenchmark
from recipes.models.dvae.task import DiscreteAutoencoder
from tests.recipes.training.fake_run import FakeRun


def test_convolutions_of_the_dvae_count():
    task = DiscreteAutoencoder(codes=8, hidden=8, blocks=1, initial=4)
    CudnnBenchmark(task).change_modules(FakeRun(task))


def test_the_lever(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    run = FakeRun(nn.Sequential(nn.Conv2d(3, 4, 3)))
    CudnnBenchmark(run.task).change_modules(run)
    assert not torch.backends.cudnn.benchmark and not run.settings["cudnn_benchmark"]
    run.device = torch.device("cuda")
    CudnnBenchmark(run.task).change_modules(run)
    assert torch.backends.cudnn.benchmark and run.settings["cudnn_benchmark"]
    assert capsys.readouterr().out == ("cudnn_benchmark: not used, it is for GPUs\ncudnn_benchmark: 1 convolutions\n")
