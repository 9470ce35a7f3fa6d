"""Checkpoints whose values are not those of a run: they are read, or refused in one line."""

import copy
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.engines.checkpoints.conversion import convert, to_composer
from recipes.engines.checkpoints.same_model import saved_at
from recipes.exporting.checkpoints import read_checkpoint
from tests.fuzzing import few, reads_or_refuses, values

COUNTS = {name: 1 for name in ("batch", "sample", "epoch", "batch_in_epoch", "sample_in_epoch")}
KEYS = torch.arange(624)


def state() -> dict:
    """A checkpoint of the engine lightning."""
    group = {"params": ["w"], "initial_lr": 0.1, "lr": 0.1}
    return {
        "format": 1,
        "counts": dict(COUNTS),
        "weights": {"w": torch.ones(2)},
        "optimizer_name": "SGD",
        "optimizer": {"state": {"w": {"step": 1}}, "param_groups": [group]},
        "scaler": {},
        "data": {"epoch": 0, "sample_in_epoch": 0},
        "levers": {"ScheduledEMA": {"average": {"w": torch.ones(2)}}},
        "callbacks": {"Throughput": {"seconds": 1.0}},
        "generators": [{"python": (3, (1,), None), "numpy": ("MT19937", KEYS, 0, 0, 0.0), "torch": torch.zeros(8)}],
    }


@st.composite
def changed(draw, tree: dict) -> dict:
    """A tree with one value replaced or removed, at any depth."""
    place = tree = copy.deepcopy(tree)
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key] and draw(st.booleans())):
            break
        place = place[key]
    if draw(st.booleans()):
        place[key] = draw(values)
    else:
        del place[key]
    return tree


@pytest.mark.parametrize("engine", ["lightning", "composer"])
def test_whatever_a_checkpoint_holds(engine, tmp_path):
    good = state() if engine == "lightning" else to_composer(state())
    other = {"lightning": "composer", "composer": "lightning"}[engine]
    folder = tmp_path / "deep" / "run" / "checkpoints"
    path = folder / {"lightning": "ep1-ba1.ckpt", "composer": "ep1-ba1-rank0.pt"}[engine]

    def read_all(tree) -> list:
        shutil.rmtree(tmp_path / "deep", ignore_errors=True)
        folder.mkdir(parents=True)
        torch.save(tree, path)
        found = [
            reads_or_refuses(saved_at, path, engine),
            reads_or_refuses(read_checkpoint, path),
            reads_or_refuses(convert, path, other),
        ]
        assert {file.parent for file in tmp_path.rglob("*") if not file.is_dir()} == {folder}
        return found

    assert all(read_all(good))

    @few
    @given(changed(good))
    def fuzz(tree):
        read_all(tree)

    fuzz()


@pytest.mark.parametrize("epoch", ["0/../../../ep0", "/ep0"])
def test_a_converted_checkpoint_stays_in_its_folder(epoch, tmp_path):
    path = tmp_path / "run" / "checkpoints" / "ep1-ba1.ckpt"
    path.parent.mkdir(parents=True)
    torch.save(state() | {"counts": COUNTS | {"epoch": epoch}}, path)
    with pytest.raises(ValueError, match="ep1-ba1.ckpt: not a whole checkpoint of a run: invalid literal for int"):
        convert(path, "composer")
    assert [file for file in tmp_path.rglob("*") if not file.is_dir()] == [path]
