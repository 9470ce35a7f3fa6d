"""Sharded checkpoints of a version in which queries, keys and values were rows of one matrix."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from recipes.convert_checkpoint import main
from recipes.engines.checkpoints.conversion import convert, from_composer, read_composer
from recipes.engines.checkpoints.plain_pickles import plain_pickles
from recipes.engines.checkpoints.sharded_files import Sharded
from recipes.engines.lightning.checkpoint_format import read_file
from recipes.exporting.checkpoints import read_checkpoint
from tests.recipes.engines.stacked import stacked
from tests.recipes.exporting.runs import a_run

SMALL = [
    "model={layers: 2, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "algorithms.scheduled_ema={name: scheduled_ema, half_life: 4ba, start: 3ba}",
]
ENGINES = ["composer", "lightning"]


def an_old_run(folder, engine, token_recipe):
    """The folder of a sharded checkpoint of that version, and the task whose weights it holds."""
    path, task = a_run(token_recipe(folder, *SMALL), engine, sharded=True, earlier=stacked)
    names = Sharded.open(path).metadata.state_dict_metadata
    assert any(name.endswith("blocks.0.branch.qkv.weight") for name in names)
    assert not any(".branch.q." in name for name in names)
    return path, task


@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_converted_to_a_full_one_of_either_engine(tmp_path, engine, to, token_recipe):
    path, task = an_old_run(tmp_path, engine, token_recipe)
    new = convert(path, to)
    assert new.is_file() and new.parent == path.parent
    link = path.parent / {"composer": "latest-rank0.pt", "lightning": "latest"}[to]
    assert link.resolve() == new
    state = read_file(new) if to == "lightning" else from_composer(read_composer(new))
    weights, trained = task.state_dict(), {name for name, _ in task.named_parameters()}
    assert state["weights"].keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state["weights"].items())
    assert set(state["optimizer"]["param_groups"][0]["params"]) == trained == set(state["optimizer"]["state"])
    for name, moments in state["optimizer"]["state"].items():
        assert moments["step"] == 1 and moments["exp_avg"].shape == weights[name].shape
    average = state["levers"]["ScheduledEMA"]["average"]
    assert average.keys() == trained
    assert all(torch.equal(tensor, weights[name] / 2) for name, tensor in average.items())
    assert state["counts"]["batch"] == 5 and state["optimizer"]["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_reads_it(tmp_path, engine, token_recipe):
    path, task = an_old_run(tmp_path, engine, token_recipe)
    found, weights = read_checkpoint(path), task.state_dict()
    assert found.weights.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.weights.items())
    assert all(torch.equal(tensor, weights[name] / 2) for name, tensor in found.average.items())
    assert found.average.keys() == {name for name, _ in task.named_parameters()}


@pytest.mark.parametrize("engine", ENGINES)
def test_going_on_from_it_ends_in_a_line_with_the_command(tmp_path, engine, token_recipe, capsys):
    path, _ = an_old_run(tmp_path, engine, token_recipe)
    with pytest.raises(ValueError) as error, plain_pickles():  # as both engines load sharded checkpoints
        dcp.load({"weights": {"bias": torch.zeros(1)}}, checkpoint_id=path)
    assert f"`python recipes/convert_checkpoint.py {path} --to {engine}`" in str(error.value)
    assert "\n" not in str(error.value)
    main([str(path), "--to", engine])
    new = path.with_name(f"{path.name}-rank0.pt" if engine == "composer" else f"{path.name}.ckpt")
    assert capsys.readouterr().out.strip() == str(new) and new.is_file()
