"""Exports of sharded checkpoints of transformers: the bytes of others, and one tensor in memory at a time."""


import pytest
import torch
from safetensors.torch import save_file

from recipes.engines.checkpoints.conversion import convert
from recipes.engines.checkpoints.deferred import Deferred
from recipes.export import main
from recipes.models.network_folder import TransformerTask
from tests.disks import small_files
from tests.recipes.engines.reading import memory_of_tensors
from tests.recipes.engines.stacked import stacked
from tests.recipes.errors import last_error
from tests.recipes.exporting.runs import a_run

SMALL = [
    "model={layers: 2, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "algorithms.scheduled_ema={name: scheduled_ema, half_life: 4ba, start: 3ba}",
    "data={resolution: 32, positions: 16, workers: 0}",
    "evals.val={resolution: 32, positions: 16, workers: 0}",
]


def written(path, out, weights):
    main([str(path), str(out), "--weights", weights])
    return (out / "transformer" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("engine", "earlier"),
    [("composer", None), ("lightning", None), ("lightning", stacked)],
    ids=["composer", "lightning", "earlier"],
)
def test_the_bytes_are_those_of_a_full_checkpoint(tmp_path, token_recipe, monkeypatch, engine, earlier):
    """Which is mapped into memory, and of weights that are all read first. Of an earlier version, with other shapes."""
    path, task = a_run(token_recipe(tmp_path / "run", *SMALL), engine, sharded=True, earlier=earlier)
    full = convert(path, "lightning")
    tensors = dict(task.network.state_dict())
    for weights, factor in (("raw", 1), ("ema", 0.5)):
        file = tmp_path / "known.safetensors"
        save_file({name: tensor * factor for name, tensor in tensors.items()}, file)
        found = written(path, tmp_path / weights, weights)
        assert found == file.read_bytes() == written(full, tmp_path / f"{weights} full", weights)
        with monkeypatch.context() as patch:
            patch.setattr(TransformerTask, "exported", None)
            assert found == written(path, tmp_path / f"{weights} at once", weights)


def test_one_tensor_is_in_memory_at_a_time(tmp_path, token_recipe, monkeypatch):
    path, task = a_run(token_recipe(tmp_path / "run", *SMALL), "lightning", sharded=True)
    sizes, held = memory_of_tensors(monkeypatch)
    main([str(path), str(tmp_path / "out")])
    assert len(sizes) == len(task.network.state_dict()) and max(held) == max(sizes) < sum(sizes) / 4


def test_a_damaged_part_or_a_full_disk_leaves_the_export_before(tmp_path, token_recipe, capsys):
    path, _ = a_run(token_recipe(tmp_path / "run", *SMALL), "composer", sharded=True)
    before = written(path, tmp_path / "out", "ema")
    with small_files(len(before) // 2):
        error = last_error(main, [path, tmp_path / "out"], capsys)
    assert f"{tmp_path / 'out'}: File too large; " in error
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 8])
    error = last_error(main, [path, tmp_path / "out"], capsys)
    assert f"{file}: not readable as a part of a checkpoint" in error
    assert (tmp_path / "out" / "transformer" / "model.safetensors").read_bytes() == before
    assert sorted(part.name for part in tmp_path.iterdir()) == ["out", "run"]


def test_stand_ins_in_another_format_of_numbers():
    deferred, values = Deferred(), torch.arange(3, dtype=torch.float64)
    found = deferred.to(deferred.stand_in(values.shape, values.dtype, lambda: values), torch.bfloat16)
    assert found.is_meta and found.dtype == torch.bfloat16
    assert deferred.read(found).equal(values.bfloat16()) and deferred.read(values) is values
    assert deferred.to(values, torch.float16).equal(values.half())
