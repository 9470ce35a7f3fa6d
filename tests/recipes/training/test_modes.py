"""Modes of modules are restored one by one."""

import pytest
from torch import nn

from recipes.training.modes import evaluation_mode


def test_each_module_gets_its_own_mode_back():
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    module[1].eval()
    module[1][1].train()
    before = [part.training for part in module.modules()]
    with pytest.raises(OSError, match="inside"), evaluation_mode(module):
        assert not any(part.training for part in module.modules())
        raise OSError("inside")
    assert [part.training for part in module.modules()] == before == [True, True, False, False, True]
