"""TensorBoard files: when they are written, also to a disk that is full for a while."""

import errno
import logging
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from recipes.engines.logs.tensorboard_files import TensorBoardWriter
from tests.disks import small_files


def test_what_comes_between_two_flushes_is_one_write(tmp_path):
    """Each figure was a write of its own, for which TensorBoard opens the file: 60 million times in a run of weeks."""
    writer = TensorBoardWriter(tmp_path, flush_every=3)
    (file,) = tmp_path.iterdir()
    sizes = []
    for step in (1, 2, 3, 4):
        writer.figures({"loss": 1.0}, step)
        writer._writer.file_writer.event_writer._async_writer._byte_queue.join()  # its thread has taken them
        sizes.append(file.stat().st_size)
    writer.close("FINISHED")
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] < file.stat().st_size


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


def test_a_folder_that_is_gone_does_not_end_a_run(tmp_path, caplog):
    """It was removed, or its mount is lost; the run ended with the error of the next write."""
    writer = TensorBoardWriter(tmp_path / "run", flush_every=1)
    writer.figures({"loss": 1.0}, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    with caplog.at_level(logging.WARNING, "precompose"):
        writer.figures({"loss": 2.0}, 2)
        noise = np.random.default_rng(0).integers(0, 256, (1, 600, 600, 3), np.uint8)  # more than may wait
        writer.images("samples", noise, 2)
        writer.figures({"loss": 3.0}, 3)
        writer.close("FINISHED")
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "run") in said and "No such file or directory; look at the disk and its mount; tra" in said


def test_a_mount_that_is_back_at_once_has_all_that_was_written_before(tmp_path, monkeypatch):
    """The file was cut to no length where its own could not be read."""
    writer = TensorBoardWriter(tmp_path, flush_every=1)
    (file,) = tmp_path.iterdir()
    stat, lost = Path.stat, []

    def lost_once(path, **options):
        if path == file and lost:
            lost.clear()
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", lost_once)
    writer.figures({"loss": 1.0}, 1)
    lost.append(file)
    writer.figures({"loss": 2.0}, 2)
    writer.figures({"loss": 3.0}, 3)
    writer.close("FINISHED")
    assert not lost
    assert [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")] == [1, 3]
