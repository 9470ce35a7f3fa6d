"""Weights and checkpoints of versions in which queries, keys and values were rows of one matrix."""

import torch
from safetensors.torch import load_file, save_file

from recipes.engines.checkpoints.legacy import upgraded
from recipes.models.autoregressive.task import Autoregressive, load_transformer
from tests.recipes.engines.stacked import stacked

SIZES = {"layers": 2, "width": 16, "heads": 2, "text_positions": 3, "text_vocabulary": 9, "side": 2, "codes": 7}


def test_an_export_of_an_earlier_version_opens(tmp_path):
    torch.manual_seed(0)
    task = Autoregressive(**SIZES, kernel=3)
    task.export(tmp_path)
    file = tmp_path / "transformer" / "model.safetensors"
    save_file(stacked(load_file(file)), file)
    assert "blocks.0.branch.qkv.weight" in load_file(file)
    weights = task.network.state_dict()
    assert all(torch.equal(t, weights[n]) for n, t in load_transformer(file.parent).state_dict().items())
    other = Autoregressive(**SIZES, kernel=3)
    other.load_export(tmp_path)
    assert all(torch.equal(t, weights[n]) for n, t in other.network.state_dict().items())


def test_a_checkpoint_of_an_earlier_version_has_this_ones_names():
    torch.manual_seed(0)
    weights = {f"task.{name}": t for name, t in Autoregressive(**SIZES, kernel=3).state_dict().items()}
    old = stacked(weights)
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": t, "codes": t[..., None].byte()} for name, t in old.items()}
    groups = [{"params": list(old), "lr": 0.1}]
    checkpoint = {"state": {"model": old, "optimizer": {"state": moments, "param_groups": groups}}}
    checkpoint["levers"] = [("ScheduledEMA", {"average": {n.removeprefix("task."): t for n, t in old.items()}})]
    new = upgraded(checkpoint)
    assert set(new["state"]["model"]) == set(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in new["state"]["model"].items())
    optimizer = new["state"]["optimizer"]
    assert set(optimizer["param_groups"][0]["params"]) == set(weights) == set(optimizer["state"])
    for name, state in optimizer["state"].items():
        assert state["step"] == 3 and torch.equal(state["exp_avg"], weights[name])
        assert state["codes"].shape == (*weights[name].shape, 1)
    average = new["levers"][0][1]["average"]
    assert all(torch.equal(average[name.removeprefix("task.")], tensor) for name, tensor in weights.items())
    assert upgraded(new["state"]["model"]).keys() == weights.keys()


def test_checkpoints_of_an_earlier_diffusion_transformer():
    """Keys and values were rows of one matrix of its cross-attention. Other models' matrices stay."""
    name = "task.denoiser.layers.3.cross_attn.kv_linear"
    both, moments = torch.arange(12.0).view(6, 2), torch.arange(6.0)
    optimizer = {f"{name}.bias": {"step": torch.tensor(7), "exp_avg": moments}}
    found = upgraded({"weights": {f"{name}.weight": both}, "optimizer": optimizer, "names": [f"{name}.bias"]})
    prefix = "task.denoiser.layers.3.cross_attn"
    assert found["names"] == [f"{prefix}.k_linear.bias", f"{prefix}.v_linear.bias"]
    assert found["weights"][f"{prefix}.k_linear.weight"].equal(both[:3])
    assert found["weights"][f"{prefix}.v_linear.weight"].equal(both[3:])
    for number, new in enumerate(found["names"]):
        assert found["optimizer"][new]["exp_avg"].equal(moments[3 * number :][:3]) and "step" in found["optimizer"][new]
    others = {"task.layers.0.attn.qkv.weight": both, "denoiser.other.attn.qkv.bias": moments}
    assert upgraded(others) == others
    own = "denoiser.y_blocks.0.attn"
    assert list(upgraded({f"{own}.qkv.bias": moments})) == [f"{own}.{part}.bias" for part in "qkv"]
