"""What saves checkpoints under Composer, without a trainer; runs that are killed are in tests/recipes/engines."""

from types import SimpleNamespace

import pytest
import torch
from composer.core import Timestamp

from recipes.engines.checkpoints.files import CheckpointFiles
from recipes.engines.composer import checkpoints
from recipes.engines.composer.checkpoints import EndIfAsked, WholeCheckpoints
from recipes.training.checkpoint_names import KINDS
from recipes.training.stop import StartAgain
from tests.recipes.training.fake_run import FakeRun


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """A run, its saver, Composer's state as far as it is read, and the batches that were written."""
    run, written, write = FakeRun(duration="9ba"), [], checkpoints._write

    def noted(state, *rest):
        written.append(state.timestamp.batch.value)
        write(state, *rest)

    def at(batch):
        run.at(batch)
        return SimpleNamespace(
            timestamp=Timestamp(batch=batch),
            fsdp_sharded_state_dict_enabled=False,
            state_dict=lambda: {"batch": batch, "algorithms": []},
        )

    monkeypatch.setattr(checkpoints, "_write", noted)
    files = CheckpointFiles(tmp_path / "checkpoints", KINDS["composer"], keep=2)
    return run, WholeCheckpoints(files, lambda state, event: True, run), at, written


def test_a_run_that_is_to_stop_saves_a_batch_once_and_waits_for_its_copy(saving, monkeypatch, tmp_path):
    run, saver, at, written = saving
    waited = []
    monkeypatch.setattr(CheckpointFiles, "wait", lambda files: waited.append(written[-1]))
    end = EndIfAsked(run, saver)
    for batch in (1, 2):
        saver.batch_checkpoint(at(batch), None)
        end.batch_checkpoint(at(batch), None)
    run.stopping = True
    with pytest.raises(StartAgain):
        end.batch_checkpoint(at(2), None)
    assert (written, waited) == ([1, 2], [2])
    with pytest.raises(StartAgain):  # where none was due in this batch
        end.batch_checkpoint(at(3), None)
    assert (written, waited) == ([1, 2, 3], [2, 3])
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("ep*")) == ["ep0-ba2-rank0.pt", "ep0-ba3-rank0.pt"]
    newest = torch.load(folder / "latest-rank0.pt", weights_only=False)
    assert newest["state"]["batch"] == 3 and len(newest["rng"]) == 1


@pytest.mark.parametrize("bad", ["a weight", "the last loss"])
def test_nothing_that_is_not_finite_is_saved(saving, tmp_path, bad, capsys):
    run, saver, at, written = saving
    saver.batch_checkpoint(at(1), None)
    state = at(2)
    if bad == "a weight":
        run.task.weight = torch.nn.Parameter(torch.tensor([float("nan")]))
    else:
        run.nonfinite = 1
    saver.batch_checkpoint(state, None)
    assert written == [1] and (tmp_path / "checkpoints" / "latest-rank0.pt").resolve().name == "ep0-ba1-rank0.pt"
    assert "batch 2 is not finite; the checkpoints before it stay" in capsys.readouterr().out
