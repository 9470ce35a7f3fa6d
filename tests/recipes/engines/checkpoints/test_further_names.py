"""Full checkpoints of sharded models that have a module twice."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.engines.checkpoints.further_names import loaded_under_each_name


@pytest.mark.parametrize("sharded", [True, False])
def test_weights_are_loaded_under_each_name(one_rank, sharded):
    """PyTorch did not copy a whole weight into a part."""
    first = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = torch.nn.Module()
    model.first, model.again, model.norm = first, first, first[1]
    model.register_buffer("unsaved", torch.ones(1), persistent=False)
    saved = {name: torch.full_like(tensor, 3) for name, tensor in model.state_dict().items()}
    assert {"again.0.weight", "norm.running_mean"} < saved.keys()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with loaded_under_each_name():
        missing = set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True))
    assert not missing.missing_keys and not missing.unexpected_keys
    for tensor in model.state_dict().values():
        assert (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() == 3).all()
