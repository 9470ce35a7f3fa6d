"""Full checkpoints are read lazily, and nothing of a run stays in the file."""

from pathlib import Path

import pytest
import torch

from tests.recipes.engines.recording import Recorder, record

NAMES = {"composer": "ep*-ba3-rank0.pt", "lightning": "ep*-ba3.ckpt"}
EMA = "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.5, start: 1ba}"


class Watch(Recorder):
    """A recorder with a tensor in checkpoints, which fills a file with zeros, in place, when training begins."""

    def __init__(self, path: Path | None = None):
        super().__init__()
        self.path = path
        self.kept = torch.arange(4) if path is None else None

    def begin(self, run):
        if self.path is not None:
            size = self.path.stat().st_size
            with self.path.open("r+b") as file:
                file.write(bytes(size))
        super().begin(run)

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


@pytest.mark.parametrize("engine", NAMES)
def test_a_run_goes_on_although_the_file_changes(quick_recipe, tmp_path, engine):
    """Memory that is mapped from a file shows what is written to the file. The optimizer has two groups."""
    changes = [
        "training.duration=6ba",
        "checkpoints={every: 3ba, keep: -1, autoresume: false}",
        "optimizer.decay_vectors=false",
        EMA,
    ]
    whole = record(engine, quick_recipe(tmp_path / "whole", *changes), Watch())
    path = next((tmp_path / "whole" / "checkpoints").glob(NAMES[engine]))
    recipe = quick_recipe(tmp_path / "resumed", *changes, f"checkpoints.load_path={path}")
    resumed = record(engine, recipe, Watch(path))
    assert not any(path.read_bytes()) and resumed.kept.tolist() == [0, 1, 2, 3]
    assert resumed.losses == whole.losses[3:]
    for kind in ("weights", "moments", "average"):
        tensors, wanted = getattr(resumed, kind), getattr(whole, kind)
        assert tensors.keys() == wanted.keys() and tensors
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items()), kind
