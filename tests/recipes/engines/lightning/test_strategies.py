"""Lightning's strategies, as they end a run."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import strategy as library

from recipes.engines.lightning.strategies import OneDevice, TaskDDP


class Module(LightningModule):
    """One whose copy to host memory is an error."""

    def cpu(self):
        raise AssertionError("copied to the host")


def of_one_device():
    return OneDevice(torch.device("cpu"))


def of_copies():
    return TaskDDP(SimpleNamespace(task=None), averaged=False)


@pytest.mark.parametrize("make", [of_one_device, of_copies])
@pytest.mark.parametrize("connected", [True, False])
def test_the_end_of_a_run_copies_nothing_to_the_host(make, connected, monkeypatch):
    """But also where a run fails before the strategy has its module."""
    moved = []
    monkeypatch.setattr(library, "_optimizers_to_device", lambda optimizers, device: moved.extend(optimizers))
    made, module = make(), Module()
    made.accelerator, made.cluster_environment = accelerator, _ = Mock(), Mock()
    if connected:
        made.connect(module)
        made.optimizers = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])]
    made.teardown()
    assert moved == [] and accelerator.teardown.called
    with pytest.raises(AssertionError, match="copied"):  # the module is as it was
        module.cpu()
