"""The figures of a set's files, by any number of processes and after interruptions."""

import json
import os
import shutil
from unittest.mock import Mock

import numpy as np
import pytest

from data.encoded.manifest import Manifest
from data.encoded.mds_index import read_index
from precompute.checking import reading
from precompute.checking.file_figures import Column, FileFigures, array_columns, file_figures
from precompute.checking.reading import figures_of_files


@pytest.fixture
def whole(latent_sets):
    """(folder, index, columns, figures) of a set of latents in four files."""
    entries, columns = read_index(latent_sets / "train"), array_columns(Manifest.read(latent_sets / "train"))
    assert len(entries) == 4
    return latent_sets / "train", entries, columns, figures_of_files(latent_sets / "train", entries, columns)


def test_any_number_of_processes_finds_the_same(whole, token_sets, monkeypatch):
    folder, entries, columns, figures = whole
    monkeypatch.setattr(reading, "AHEAD", 1)  # fewer files than there are
    for workers in (1, 2, 3):
        assert figures_of_files(folder, entries, columns, workers) == figures
    folder = token_sets / "train"
    entries, columns = read_index(folder), array_columns(Manifest.read(folder))
    assert figures_of_files(folder, entries, columns, 2) == figures_of_files(folder, entries, columns)


def test_figures_are_those_of_the_samples(whole, read):
    folder, _, columns, figures = whole
    samples = read(folder)
    assert figures.samples == len(samples) and not figures.faults
    assert figures.columns.keys() == {name for name in columns if not name.startswith("crop_")}
    for name, found in figures.columns.items():
        values = np.stack([sample[name] for sample in samples]).astype(np.float64)
        assert found.largest == np.abs(values).max() and found.nonfinite == found.saturated == 0
        if name != "text":
            np.testing.assert_allclose(found.sums, values.sum((0, 2, 3)), rtol=1e-9)
            np.testing.assert_allclose(found.squares, np.square(values).sum((0, 2, 3)), rtol=1e-9)


def test_values_that_are_no_numbers_do_not_count():
    values = np.zeros((2, 2, 1, 3), np.float16)
    values[0, 0, 0] = np.nan, -np.inf, -65504
    values[1, 1, 0] = 3, -4, 5
    found = Column(values.shape[1:], values.dtype, True, None, True).figures(values)
    assert (found.nonfinite, found.saturated, found.largest, found.count) == (2, 1, 65504.0, 6)
    assert (found.sums, found.squares) == ([-65504.0, 4.0], [65504.0**2, 50.0])
    assert Column((3,), values.dtype, True, None, False).figures(-values[1:, 1, 0]).largest == 5


def test_an_interrupted_check_goes_on(whole, tmp_path, monkeypatch, capsys):
    folder, entries, columns, figures = whole
    progress, looked = tmp_path / "out" / "progress.json", []

    def interrupted(folder, entry, columns, texts):
        looked.append(entry["raw_data"]["basename"])
        if len(looked) == 3:
            raise KeyboardInterrupt
        return file_figures(folder, entry, columns, texts)

    monkeypatch.setattr(reading, "file_figures", interrupted)
    with pytest.raises(KeyboardInterrupt):
        figures_of_files(folder, entries, columns, progress=progress)
    assert figures_of_files(folder, entries, columns, progress=progress) == figures
    assert looked == [entries[number]["raw_data"]["basename"] for number in (0, 1, 2, 2, 3)]
    assert f"goes on behind 2 of 4 files; to read all, delete {progress}" in capsys.readouterr().out
    assert figures_of_files(folder, entries, columns, progress=progress) == figures and len(looked) == 5
    kept = json.loads(progress.read_text())
    del kept["figures"]["columns"]["text"]["largest"]
    kept["figures"]["columns"]["text"]["smallest"] = 0.0
    progress.write_text(json.dumps(kept))  # of another version
    assert figures_of_files(folder, entries, columns, progress=progress) == figures and len(looked) == 9
    other = shutil.copytree(folder, tmp_path / "set")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest))  # in other bytes
    assert figures_of_files(other, entries, columns, progress=progress) == figures and len(looked) == 13


def test_a_check_that_is_interrupted_while_it_adds_up_counts_no_file_twice(whole, tmp_path, monkeypatch):
    folder, entries, columns, figures = whole
    progress, add, added = tmp_path / "progress.json", FileFigures.add, []

    def interrupted(total, other):
        add(total, other)
        added.append(other)
        if len(added) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileFigures, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            figures_of_files(folder, entries, columns, progress=progress)
    assert figures_of_files(folder, entries, columns, progress=progress) == figures


def test_files_with_faults_are_read_again(whole, tmp_path):
    folder, entries, columns, figures = whole
    other = shutil.copytree(folder, tmp_path / "set")
    progress, path = tmp_path / "progress.json", other / entries[1]["raw_data"]["basename"]
    shutil.move(path, tmp_path / "away")
    (fault,) = figures_of_files(other, entries, columns, progress=progress).faults
    assert fault == f"{path}: missing" and not progress.exists()
    shutil.move(tmp_path / "away", path)
    assert figures_of_files(other, entries, columns, progress=progress) == figures


def test_a_process_that_dies_costs_one_line(whole, monkeypatch):
    monkeypatch.setattr(reading, "_begin", lambda: os._exit(9))
    with pytest.raises(ValueError, match="a process that reads files died.*give fewer --workers"):
        figures_of_files(*whole[:3], workers=2)


def test_a_file_that_lacks_memory_has_no_fault(whole, monkeypatch):
    monkeypatch.setattr("precompute.checking.file_figures.locate", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        figures_of_files(*whole[:3])
