"""Runs that no training made: their folders as both engines leave them, with figures of known values."""

from pathlib import Path

import numpy as np
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from data.image_grid import picture_grid, save_png

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = ["red heart", "a house"]
EVIL = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>'\"&"


def log(folder, rows):
    """One session of a run: (time in seconds, batch, {figure: value}) each."""
    writer = EventFileWriter(str(folder))
    for time, batch, figures in rows:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        writer.add_event(Event(wall_time=time, step=batch, summary=Summary(value=values)))
    writer.close()


def made_run(
    folder, name="made", prompts=PROMPTS, grids=(4, 8), batches=8, ended=True, base="openmoji_diffusion", **changes
):
    """A run of `batches` batches of 64 samples, a second each, whose loss is 1 / batch. Figures of a batch are logged
    with the number of batches before it, and counts once more when the run ends."""
    values = yaml.safe_load((ROOT / "yamls" / f"{base}.yaml").read_text())
    values |= {"run_name": name, "output": str(folder)}
    if base == "openmoji_diffusion":
        values["callbacks"]["sample_grid"] |= {"prompts": prompts, "columns": None}
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        values.setdefault(section, {})[inner] = value
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    shares = {f"time/share/{part}": share for part, share in (("forward", 0.25), ("backward", 0.5))}
    figures = {"throughput/samples_per_sec": 64.0, "metrics/val/loss": 0.5, **shares}
    rows = [
        (1000.0 + batch, batch, {"time/sample": 64.0 * batch, "loss/train/total": 1 / (batch + 1), **figures})
        for batch in range(batches)
    ]
    rows += [(1000.0 + batches, batches, {"time/sample": 64.0 * batches})] if ended else []
    log(folder / "tensorboard" / "made", rows)
    for batch in grids:
        pixels = np.stack([np.full((16, 16, 3), 20 * batch + i, np.uint8) for i in range(len(prompts))])
        save_png(picture_grid(pixels, prompts), folder / "samples" / f"ba{batch:07d}.png")
    return folder
