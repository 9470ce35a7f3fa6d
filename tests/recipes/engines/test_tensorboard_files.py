"""TensorBoard files on a disk that is full for a while."""

import logging

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from recipes.engines.composer.loggers import composer_logger
from recipes.engines.lightning.loggers import lightning_logger
from recipes.engines.loggers import TensorBoard
from tests.disks import small_files


def writer_of(engine, folder):
    """The writer of an engine's logger."""
    description = TensorBoard(str(folder), flush_every=1)
    if engine == "lightning":
        return lightning_logger(description, "run").experiment
    logger = composer_logger(description)
    logger.run_name = "run"
    logger._initialize_summary_writer()
    return logger.writer


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_full_disk_costs_figures_and_a_line(tmp_path, caplog, engine):
    """TensorBoard's thread ended, and the run with it. What comes when there is room is in the file again."""
    writer = writer_of(engine, tmp_path)
    writer.add_scalar("loss", 0.0, 0)
    writer.flush()
    (file,) = (tmp_path / "run").iterdir()
    with caplog.at_level(logging.WARNING, "precompose"), small_files(file.stat().st_size + 5):  # half a record
        for step in range(1, 20):
            writer.add_scalar("loss", float(step), step)
        writer.flush()
    writer.add_scalar("loss", 20.0, 20)
    writer.close()
    assert [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")] == [0, 20]
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("loggers: ")]
    assert said.startswith(f"loggers: {file}: File too large; raise the limit") and "training goes on" in said
