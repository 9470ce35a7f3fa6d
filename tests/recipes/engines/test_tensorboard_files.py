"""TensorBoard files on a disk that is full for a while."""

import logging

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from recipes.engines.tensorboard_files import TensorBoardWriter
from tests.disks import small_files


def test_a_full_disk_costs_figures_and_a_line(tmp_path, caplog):
    """TensorBoard's thread ended, and the run with it. What comes when there is room is in the file again."""
    writer = TensorBoardWriter(tmp_path, flush_every=100)
    writer.figures({"loss": 0.0}, 100)
    (file,) = tmp_path.iterdir()
    with caplog.at_level(logging.WARNING, "precompose"), small_files(file.stat().st_size + 5):  # half a record
        for step in range(101, 201):
            writer.figures({"loss": float(step)}, step)
    writer.figures({"loss": 201.0}, 201)
    writer.close("FINISHED")
    assert [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")] == [100, 201]
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("loggers: ")]
    assert said.startswith(f"loggers: {file}: File too large; raise the limit") and "training goes on" in said
