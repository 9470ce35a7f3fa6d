"""Full checkpoints are read lazily, and nothing of a run stays in the file."""

from pathlib import Path

import pytest
import torch

from tests.recipes.engines.recording import Recorder, record

NAMES = {"composer": "ep*-ba3-rank0.pt", "lightning": "ep*-ba3.ckpt"}
EMA = "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.5, start: 1ba}"


class Overwriter(Recorder):
    """A recorder that fills a file with zeros, in place, when training begins."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def begin(self, run):
        size = self.path.stat().st_size
        with self.path.open("r+b") as file:
            file.write(bytes(size))
        super().begin(run)


@pytest.mark.parametrize("engine", NAMES)
def test_a_run_goes_on_although_the_file_changes(quick_recipe, tmp_path, engine):
    """Memory that is mapped from a file shows what is written to the file. The optimizer has two groups."""
    changes = [
        "training.duration=6ba",
        "checkpoints={every: 3ba, keep: -1, autoresume: false}",
        "optimizer.decay_vectors=false",
        EMA,
    ]
    whole = record(engine, quick_recipe(tmp_path / "whole", *changes))
    path = next((tmp_path / "whole" / "checkpoints").glob(NAMES[engine]))
    recipe = quick_recipe(tmp_path / "resumed", *changes, f"checkpoints.load_path={path}")
    resumed = record(engine, recipe, Overwriter(path))
    assert not any(path.read_bytes())
    assert resumed.losses == whole.losses[3:]
    for kind in ("weights", "moments", "average"):
        tensors, wanted = getattr(resumed, kind), getattr(whole, kind)
        assert tensors.keys() == wanted.keys() and tensors
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items()), kind
