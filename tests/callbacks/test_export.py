"""Exports appear whole, keep the old one until then, and are called complete only at the end of a run."""

import json
from types import SimpleNamespace

import pytest
from composer import Event, Time
from composer.core import Timestamp

from callbacks.export import Export, export, replace_folder
from data.bpe import Vocabulary
from data.loading import Loading
from data.manifest import Manifest
from recipes.config.build import encoders_of
from recipes.models.task import Task


class Accident(Task):
    """Writes its version, in two files with an accident between them."""

    version, accident = 1, False

    def export(self, folder):
        assert (folder.parent / "export").exists() == self.had_one  # the old one stays until the new one is whole
        (folder / "first").write_text(str(self.version))
        if self.accident:
            raise OSError("disk full")
        (folder / "second").write_text(str(self.version))


@pytest.fixture
def task():
    task = Accident()
    task.had_one = False
    return task


LOADING = Loading(loader=None)


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_an_accident_leaves_the_old_export(tmp_path, task):
    folder = tmp_path / "export"
    export(task, LOADING, folder, {"batches": 1}, complete=True)
    assert names(tmp_path) == ["done.json", "export", "export.json", "first", "second"]
    task.version, task.accident, task.had_one = 2, True, True
    with pytest.raises(OSError, match="disk full"):
        export(task, LOADING, folder, {"batches": 2}, complete=True)
    assert names(tmp_path) == ["done.json", "export", "export.json", "first", "second"]
    assert (folder / "first").read_text() == "1" and json.loads((folder / "export.json").read_text()) == {"batches": 1}
    task.accident = False
    export(task, LOADING, folder, {"batches": 2}, complete=False)
    assert names(tmp_path) == ["export", "export.json", "first", "second"]  # no longer called complete
    assert (folder / "second").read_text() == "2"


def test_a_first_export_that_fails_leaves_nothing(tmp_path, task):
    task.accident = True
    with pytest.raises(OSError, match="disk full"):
        export(task, LOADING, tmp_path / "export", {}, complete=True)
    assert names(tmp_path) == []


def test_folders_are_replaced(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert names(tmp_path) == ["file", "old"] and (tmp_path / "old" / "file").read_text() == "new"


def test_done_is_said_at_the_end_and_once(tmp_path, task, capsys):
    written = []

    def write(folder):
        written.append(state.timestamp.batch.value)
        task.had_one = True

    task.export = write
    callback = Export(task, "run", str(tmp_path), LOADING, None, every="2ba")
    length = Time.from_timestring("4ba")
    state = SimpleNamespace(timestamp=Timestamp(), previous_timestamp=None, max_duration=length, algorithms=[])
    state.get_elapsed_duration = lambda: Time.from_timestring("1dur") * (state.timestamp.batch.value / 4)
    for batch in range(1, 5):
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=3)
        callback.run_event(Event.BATCH_END, state, None)
        assert (tmp_path / "export").exists() == (batch >= 2)
        assert not (tmp_path / "export" / "done.json").exists()
    assert written == [2]
    callback.run_event(Event.FIT_END, state, None)
    assert written == [2, 4]
    record = {"run_name": "run", "batches": 4, "samples": 12}
    assert json.loads((tmp_path / "export" / "done.json").read_text()) == record
    assert capsys.readouterr().out == f"weights: {tmp_path}/export\n"


def test_an_export_of_token_data_has_its_vocabulary_and_dvae(tmp_path, task, token_sets):
    vocabulary = token_sets / "vocabulary.json"
    manifest = Manifest.read(token_sets / "train")
    loading = Loading(loader=None, manifest=manifest, resolution=32, vocabulary=vocabulary)
    folder = tmp_path / "export"
    export(task, loading, folder, {}, complete=True)
    assert Vocabulary.read(folder / "vocabulary.json").size == 280
    assert (folder / "vocabulary.manifest.json").is_file() and not (folder / "null_text.npy").exists()
    images, texts = encoders_of(Manifest.read(folder), folder)
    assert images.codes == 32 and images.id == str(folder / "image_encoder") and texts is None
    assert json.loads((folder / "export.json").read_text()) == {"resolution": 32}
