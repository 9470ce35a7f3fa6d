"""Results of several runs of the command for a GPU: what of them counts, what may be compared, and where it goes."""

import json
import time

import pytest

from benchmarks import gpu
from benchmarks.common import reporting
from benchmarks.gpu_run import page as pages
from benchmarks.gpu_run.items import Item
from benchmarks.gpu_run.page import BEGIN, END, page
from benchmarks.gpu_run.records import DONE, LATE, LEFT_OUT, RECORDS, RELATIVE, Records
from benchmarks.gpu_run.subjects import BEST, START
from benchmarks.gpu_run.trained import setting

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def begin(records, commit="abc", name=H100, date="2026-11-24", small=False):
    found = {"gpu": name, "date": date, "commit": commit, "python": "3", "versions": {"torch": "2"}}
    records.begin_run(surroundings=found, small=small)


def measure(records, item, state="done", table="U-Net at 256", **rates):
    """A step with a row for each of the rates."""
    records.add("begin", item=item)
    for name, rate in rates.items():
        name = START if name == "start" else name
        values = {"setting": name, "images/s": rate, RELATIVE: ""}
        records.row(table, values, setting=name, change=[name], rate=rate)
    records.add("end", item=item, state=state, seconds=1)


def rates(records, table="U-Net at 256"):
    return {row["setting"]: (row["rate"], row["values"][RELATIVE]) for row in records.rows(table)}


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "run" / RECORDS)


@pytest.fixture
def document(tmp_path, monkeypatch):
    """The page and the folder to which results are placed."""
    path = tmp_path / "gpu.md"
    path.write_text(f"# Page\n\n{BEGIN}\n\nNone yet.\n\n{END}\n\nend\n")
    monkeypatch.setattr(pages, "DOCUMENT", path)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    return path


def test_a_run_that_was_cut_off(records):
    begin(records)
    records.add("begin", item="one")
    records.row("U-Net at 256", {"setting": START, "images/s": 450.0})
    records.row("U-Net at 256", {"setting": "other", "images/s": "OutOfMemoryError: a | b", "extra": 1})
    with open(records.path, "a") as file:
        file.write('{"kind": "row", "table": "U-N')
    text = page(records)
    assert "| U-Net training at 256 | images/s | 900 | 450.0 | 50% |" in text
    assert "| one | cut off |" in text and "a \\| b | 1 |" in text
    records.add("end", item="one", state="FAILED", seconds=2)
    assert "| one | FAILED | 2 |" in page(records)  # the broken line has not taken this one with it


def test_a_newer_run_of_a_step_replaces_that_step_only(records):
    begin(records)
    measure(records, "start", start=100)
    measure(records, "a", a=110)
    measure(records, "b", b=50)
    begin(records, date="2026-11-25")
    measure(records, "b", b=150)
    assert rates(records) == {START: (100, ""), "a": (110, 1.1), "b": (150, 1.5)}
    text = page(records)
    assert "50.0" not in text.replace("150", "") and text.count("# U-Net at 256\n") == 1
    assert "2026-11-24, 2026-11-25, commit abc" in text
    measure(records, "start", start=200)  # what is relative to it follows
    assert rates(records)["b"] == (150, 0.75)


def test_a_run_goes_on_with_what_is_not_done(records):
    begin(records)
    measure(records, "one", start=100)
    measure(records, "two", state="FAILED: out of memory")
    measure(records, "three", state=LEFT_OUT)
    begin(records)
    assert records.tried() == {"one": True, "two": False}
    begin(records, commit="def")
    assert records.tried() == {}


def test_what_was_ended_early_does_not_replace_what_was_whole(records):
    begin(records)
    measure(records, "start", start=100, a=110, state="FAILED: a is wrong")
    begin(records)
    measure(records, "start", start=90, state=f"{LATE} 30 s")
    assert rates(records) == {START: (100, ""), "a": (110, 1.1)}
    begin(records, commit="def")
    measure(records, "start", start=90, state=f"{LATE} 30 s")
    assert rates(records) == {START: (90, "")}  # of another commit, it is all there is


def test_steps_that_are_done_are_not_run_again(unprepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRECOMPOSE_COMMIT", "abc")
    ran = []
    monkeypatch.setattr(gpu, "perform", lambda item, folder, small: ran.append(item.name))
    words = ["--small", "--device", "cpu", "--here", "--out", str(tmp_path), "--resume", "--only"]
    gpu.main([*words, "numbers dvae"])
    gpu.main([*words, "numbers dvae", "geglu"])
    assert ran == ["numbers dvae", "geglu"] and "1 steps are done, 1 are left" in capsys.readouterr().out


def test_steps_that_failed_come_after_those_that_no_run_has_tried(unprepared, tmp_path, monkeypatch):
    monkeypatch.setenv("PRECOMPOSE_COMMIT", "abc")  # a checkout with changes has no name
    ran = []

    def fail(item, folder, small):
        ran.append(item.name)
        raise ValueError("no")

    monkeypatch.setattr(gpu, "perform", fail)
    words = ["--small", "--device", "cpu", "--here", "--out", str(tmp_path), "--resume", "--only"]
    gpu.main([*words, "numbers dvae"])
    gpu.main([*words, "numbers dvae", "geglu"])
    assert ran == ["numbers dvae", "geglu", "numbers dvae"]


def test_what_found_nothing_replaces_nothing(records):
    begin(records)
    measure(records, "start", start=100)
    measure(records, "a", state=LEFT_OUT)
    begin(records)
    measure(records, "start", state=LEFT_OUT)
    measure(records, "start", state="FAILED: no memory")
    measure(records, "a", a=120)
    assert rates(records) == {START: (100, ""), "a": (120, 1.2)}
    text = page(records)
    assert "| start | FAILED: no memory |" in text and "| start | done |" in text and LEFT_OUT not in text


@pytest.mark.parametrize(
    "other", [{"name": H200}, {"commit": "def"}, {"commit": "def and changes"}, {"small": True}], ids=str
)
def test_what_may_differ_for_other_reasons_is_not_in_one_table(records, other):
    begin(records)
    measure(records, "start", start=100)
    measure(records, "a", a=110)
    begin(records, **other)
    measure(records, "a", a=300)
    assert rates(records) == {"a": (300, "")}
    first, second = page(records).split("\n## ")[1:]
    assert "300" in first and "110" not in first and START not in first  # the newest is first
    assert START in second and ("110" in second) == (other.keys() != {"commit"})  # replaced, on the same GPU only
    if "commit" in other:
        begin(records, **other)
        measure(records, "start", start=200)
        expected = {START: (200, "")} | ({"a": (300, 1.5)} if other["commit"] == "def" else {})
        assert rates(records) == expected


def test_all_that_pay_needs_a_starting_point_of_the_same_commit(records):
    from benchmarks.gpu_run.context import Context

    begin(records)
    measure(records, "start", start=100)
    begin(records, commit="def")
    records.add("begin", item="best")
    with pytest.raises(ValueError, match="no starting point of U-Net at 256 by this commit"):
        setting(Context(records.path.parent, True), subject="unet_256", name=BEST)


def test_a_run_in_the_folder_of_another_keeps_its_results(unprepared, tmp_path, capsys):
    arguments = ["--small", "--device", "cpu", "--here", "--out", str(tmp_path), "--only"]
    gpu.main([*arguments, "geglu"])
    records = gpu.main([*arguments, "powersgd"])
    assert len(records.lines("run")) == 2
    text = (tmp_path / "gpu.md").read_text()
    assert "## geglu, small" in text and "## powersgd_cost, d64" in text
    assert "| geglu | done |" in text and "| powersgd cost | done |" in text
    assert "geglu, small" in capsys.readouterr().out


def test_placed_results_are_merged_by_step(tmp_path, records, document):
    """Runs of another machine each come in a file of their own; an older one that is placed again changes nothing."""
    tables = []
    with reporting.collected(tables.append):
        reporting.keep_results("norms", "sd2", [{"a": 1}])
        reporting.write_results("norms", "sd2", [{"a": 1}, {"a": 2}], "note")
    assert not (tmp_path / "results").exists()
    begin(records)
    measure(records, "start", start=100)
    measure(records, "a", a=110)
    records.add("begin", item="norms")
    for record in tables:
        records.add("record", record=record)
    records.add("end", item="norms", state="done", seconds=3)
    assert gpu.main(["--place", str(records.path)]) is None
    (file,) = (tmp_path / "results").glob("norms-*.json")
    assert len(json.loads(file.read_text())["rows"]) == 2
    first = document.read_text()
    assert "None yet" not in first and "#### norms, sd2" in first and first.endswith(f"{END}\n\nend\n")
    newer = Records(tmp_path / "newer" / RECORDS)
    begin(newer)
    measure(newer, "a", a=130)
    file.unlink()
    gpu.main(["--place", str(newer.path)])
    assert not file.exists()  # a table that was placed before may have been measured again since
    second = document.read_text()
    assert "| a | 130 | 1.3 |" in second and "| 110 |" not in second
    assert f"| {START} | 100 |" in second and "#### norms, sd2" in second
    for again in (records, newer, records):
        gpu.main(["--place", str(again.path)])
        assert document.read_text() == second
    kept = Records(tmp_path / "results" / RECORDS)
    assert [len(kept.lines(kind)) for kind in ("run", "begin", "record")] == [2, 3, 1]


def test_tiny_sizes_are_not_placed(records, document, capsys):
    begin(records, small=True)
    measure(records, "start", start=100)
    with pytest.raises(SystemExit):
        gpu.main(["--place", str(records.path)])
    assert "has no results at the published sizes" in capsys.readouterr().err
    assert "None yet" in document.read_text()


def test_what_a_fork_without_cuda_has_found_is_replaced_by_the_process_after_it(tmp_path):
    records = Records(tmp_path / RECORDS)
    records.begin_run(surroundings={"gpu": "A", "commit": "1"}, small=False, budget=1)

    class Runner(gpu.Isolated):
        def __init__(self):
            self.forks = True

        def __call__(self, item, limit):
            records.row("norms", {"ms": "an error" if self.forks else 1.0})
            return "FAILED: RuntimeError: Cannot re-initialize CUDA in forked subprocess" if self.forks else DONE

        def without_forks(self):
            self.forks = False

    gpu.run_all([Item("norms", "norms", 9.0)], Runner(), records, time.monotonic() + 60, lambda line: None)
    assert [row["values"] for row in records.rows("norms")] == [{"ms": 1.0}]
    assert [line["state"][:6] for line in records.lines("end")] == ["FAILED", "done"]
