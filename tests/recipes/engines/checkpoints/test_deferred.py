"""Conversions that read each tensor when they write it: the same bytes, and one tensor in memory at a time."""


import pytest
import torch
import torch.distributed.checkpoint as dcp

from recipes.convert_checkpoint import main
from recipes.engines.checkpoints import conversion
from recipes.engines.checkpoints.checksums import save_full
from recipes.engines.checkpoints.conversion import convert
from recipes.engines.checkpoints.deferred import Deferred
from recipes.engines.checkpoints.sharded_files import Sharded
from tests.disks import small_files
from tests.recipes.engines.reading import memory_of_tensors
from tests.recipes.engines.stacked import stacked
from tests.recipes.exporting.runs import a_run

SMALL = [
    "model={layers: 2, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "algorithms.scheduled_ema={name: scheduled_ema, half_life: 4ba, start: 3ba}",
]
ENGINES = ["composer", "lightning"]


@pytest.mark.parametrize("earlier", [None, stacked], ids=["now", "earlier"])
@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_bytes_are_those_of_values_that_were_read_at_once(tmp_path, token_recipe, monkeypatch, engine, to, earlier):
    path, task = a_run(token_recipe(tmp_path / "run", *SMALL), engine, sharded=True, earlier=earlier)
    stand_in, deferred = Deferred.stand_in, []
    monkeypatch.setattr(Deferred, "stand_in", lambda *given: deferred.append(given[1]) or stand_in(*given))
    found = convert(path, to).read_bytes()
    number = len(dict(task.named_parameters()))
    assert len(deferred) >= (2 * number if earlier else 4 * number), "weights, two values of moments, averages"
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_is_moved", lambda path: False)
        deferred.clear()
        assert convert(path, to).read_bytes() == found and not deferred


def test_one_tensor_is_in_memory_at_a_time(tmp_path, token_recipe, monkeypatch):
    path, _ = a_run(token_recipe(tmp_path / "run", *SMALL), "composer", sharded=True)
    sizes, held = memory_of_tensors(monkeypatch)
    convert(path, "lightning")
    assert max(held) < max(sizes) + 1000 < sum(sizes) / 6  # states of generators are small, and kept


def test_parts_of_a_stand_in_are_written_with_its_memory(tmp_path):
    values, deferred = {name: torch.arange(10.0) + number for number, name in enumerate("abc")}, Deferred()
    stand_ins = {
        name: deferred.stand_in(tensor.shape, tensor.dtype, lambda name=name: values[name])
        for name, tensor in values.items()
    }
    shared = {"number": 1}

    def state(tensors):
        halves = tensors["a"].chunk(2)
        return {"list": [tensors["b"], halves[0]], "tuple": (halves[1], shared), "again": tensors["b"], "x": shared}

    for folder in ("now", "later"):
        (tmp_path / folder).mkdir()
    save_full(state(values), tmp_path / "now" / "é.pt")
    deferred.save(state(stand_ins), tmp_path / "later" / "é.pt")
    assert (tmp_path / "later" / "é.pt").read_bytes() == (tmp_path / "now" / "é.pt").read_bytes()
    with pytest.raises(RuntimeError, match="meta"):
        float(stand_ins["c"].sum())


def test_a_damaged_part_is_found_and_nothing_is_left(tmp_path, token_recipe, capsys):
    path, _ = a_run(token_recipe(tmp_path / "run", *SMALL), "composer", sharded=True)
    before = {file.name for file in path.parent.iterdir()}
    (file,) = path.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SystemExit, match="2"):
        main([str(path), "--to", "lightning"])
    error = capsys.readouterr().err
    assert f"{file}: not readable as a part of a checkpoint" in error and error.count("\n") == 1
    assert {file.name for file in path.parent.iterdir()} == before
    file.write_bytes(whole)
    with small_files(len(whole) // 2), pytest.raises(SystemExit, match="2"):
        main([str(path), "--to", "lightning"])
    error = capsys.readouterr().err
    assert f"{path}.ckpt: File too large; raise the limit" in error and error.count("\n") == 1
    assert {file.name for file in path.parent.iterdir()} == before


def test_a_tensor_that_claims_more_than_the_files_is_refused_before_it_gets_memory(tmp_path, monkeypatch):
    dcp.save({"weights": {"a": torch.ones(4)}}, checkpoint_id=tmp_path / "ep0-ba1")
    sharded = Sharded.open(tmp_path / "ep0-ba1")
    kind = sharded.metadata.state_dict_metadata["weights.a"]
    monkeypatch.setattr(kind, "size", torch.Size([1 << 40]))
    monkeypatch.setattr(Deferred, "stand_in", None)
    with pytest.raises(ValueError, match="weights.a is not complete; it is larger than all files together"):
        sharded.nested(deferred=Deferred())
