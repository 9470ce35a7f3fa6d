"""The page of a comparison: what it holds, that nothing of a run becomes markup, and what a browser makes of it."""

import errno
import re
import shutil
import subprocess
from html.parser import HTMLParser
from unittest.mock import Mock

import pytest

from recipes import compare
from recipes.comparison import pictures
from recipes.comparison.runs import read_runs
from tests.recipes.comparison.made import EVIL, PROMPTS, ROOT, log, made_run

VOID = {"meta", "input", "img"}
CHROMIUM = shutil.which("chromium")


class Page(HTMLParser):
    """The elements of a page with their attributes and their text; fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, place in self.open:
            self.text[place] = self.text.get(place, "") + data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def texts(self, tag):
        return [self.text.get(place, "") for place, (name, _) in enumerate(self.elements) if name == tag]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs that differ in a learning rate, in a batch size, and in a label that is markup."""
    root = tmp_path_factory.mktemp("runs")
    prompts = [*PROMPTS, EVIL]
    one = made_run(root / "one", "first", prompts, optimizer__lr=1e-3)
    other = made_run(root / "two", EVIL, prompts, grids=(2, 4, 8), optimizer__lr=5e-4, schedule__final=EVIL)
    return one, other


@pytest.fixture(scope="module")
def written(folders):
    out = folders[0].parent / "report.html"
    compare.main([*map(str, folders), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def page(written):
    return Page(written.read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(page, written):
    assert not page.all("link") and not page.all("iframe") and [s for s in page.all("script") if s] == []
    assert all(image["src"].startswith("data:image/webp;base64,") for image in page.all("img"))
    assert not re.findall(r"(?:https?:)?//\w|@import|url\(", written.read_text().split("<body>")[0])
    policy = page.all("meta")[1]["content"]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_nothing_of_a_run_is_markup(page):
    assert len(page.all("script")) == 1 and not [a for _, a in page.elements if any(k.startswith("on") for k in a)]
    assert EVIL in page.texts("h1")[0] and EVIL in page.texts("h3")
    assert EVIL in [image["alt"] for image in page.all("img")]
    assert any(EVIL in text for text in page.texts("td"))  # as a value of the config


def test_labels_and_headings(page):
    labelled = [a for name, a in page.elements if name == "svg" and a.get("role") == "img"]
    assert labelled and all(a["aria-label"] for a in labelled)
    assert all(a.get("aria-hidden") == "true" for name, a in page.elements if name == "svg" and "role" not in a)
    ids = {a["id"] for _, a in page.elements if "id" in a}
    assert {a["for"] for a in page.all("label") if "for" in a} <= ids and len(page.texts("h1")) == 1
    assert all(a.get("aria-label") and a["tabindex"] == "0" for a in page.all("div") if a.get("role") == "region")
    assert all(image["alt"] for image in page.all("img"))
    assert page.all("html") == [{"lang": "en"}] and {a.get("scope") for a in page.all("th")} == {"row", "col"}


def test_figures_of_the_runs(page):
    rows = [row for row in page.texts("tr")]
    assert "Batches88" in rows and "Samples512512" in rows
    assert "loss/train/total, at the end0.1250.125" in rows and "Samples per second, median6464" in rows
    charts = [a["aria-label"] for a in page.all("svg") if a.get("role") == "img"]
    for axis in ("batches", "samples", "hours"):
        assert sum(f"loss/train/total against {axis}" in label for label in charts) == 1
    assert any(re.search(r"25\.0%.*|50\.0%.*", row) for row in rows)


def test_the_length_of_a_run_that_has_not_ended(tmp_path):
    """Its last batch is counted, too: of 8, all losses were logged."""
    out = tmp_path / "report.html"
    compare.main([str(made_run(tmp_path / "run", ended=False)), "--out", str(out)])
    page = Page(out.read_text(encoding="utf-8"))
    assert "Batches8" in page.texts("tr") and "Samples512" in page.texts("tr")
    assert [a["data-samples"] for a in page.all("figure") if a.get("data-batches") == "8"] == ["512"] * len(PROMPTS)


def test_what_only_some_runs_have(tmp_path):
    """A figure, a share of the time and prompts of the first run alone; a run that has logged losses and no more."""
    first = made_run(tmp_path / "first")
    log(first / "tensorboard" / "later", [(1010.0, 8, {"time/share/communication": 0.1, "learning_rate/0": 1e-3})])
    other, little = made_run(tmp_path / "other", prompts=["a tree"]), tmp_path / "little"
    little.mkdir()
    shutil.copyfile(first / "config.yaml", little / "config.yaml")
    log(little / "tensorboard", [(1000.0 + batch, batch, {"loss/train/total": 1.0}) for batch in range(5)])
    texts = []
    for runs in ([first, other], [first, little], [little]):
        compare.main([*map(str, runs), "--out", str(tmp_path / "report.html")])
        texts.append(Page((tmp_path / "report.html").read_text(encoding="utf-8")))
    rows = texts[0].texts("tr")
    assert any(row.endswith("forwardbackwardcommunication") for row in rows)
    assert [row.split("%25.0%")[1] for row in rows if "%25.0%" in row] == ["50.0%10.0%", "50.0%not logged"]
    assert texts[0].texts("summary") == ["1 more figures"]
    assert "No prompt was drawn by all runs." in texts[0].texts("p")
    rows = texts[1].texts("tr")
    assert "metrics/val/loss, at the end0.5not logged" in rows and "Samples per second, median64not logged" in rows
    assert "Samples512320" in rows  # the batches of a run that counts no samples, times their size
    assert "The configs are the same, but for the name and the folder of the run." in texts[1].texts("p")
    assert {"No pictures were drawn.", "None were logged; the callback throughput does."} <= set(texts[2].texts("p"))


def test_grids_of_other_prompts_than_those_of_the_config_are_left_out(tmp_path, capsys):
    folder = made_run(tmp_path / "run", grids=(4,))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("- a house\n", "- a house\n    - a tree\n    - a cat\n"))
    (run,) = read_runs([folder], 12, 32)
    assert not run.pictures
    assert "the grid of batch 4 is not one of the prompts in config.yaml; left out" in capsys.readouterr().out


def test_differences_of_the_configs(page):
    keys = [text for text in page.texts("code")]
    assert keys == ["optimizer.lr", "schedule.final"]
    assert "optimizer.lr0.0010.0005" in page.texts("tr")


def test_pictures_of_a_prompt_through_training(page, folders):
    figures = [a for a in page.all("figure") if "data-batches" in a]
    assert [a["data-batches"] for a in figures] == ["4", "8", "2", "4", "8"] * 3
    assert [a["data-samples"] for a in figures[:2]] == ["256", "512"]
    assert ["hidden" in a for a in figures] == [True, False, True, True, False] * 3
    (run,) = read_runs([folders[0]], 1, 8)
    assert [p.batch for p in run.pictures[PROMPTS[0]]] == [8] and run.pictures[PROMPTS[0]][0].size == (8, 8)


def test_pictures_of_lost_batches_are_left_out(tmp_path):
    """The folder also has the grids of a longer run, in whose place this one was begun anew."""
    (run,) = read_runs([made_run(tmp_path / "run", grids=(4, 8, 10, 12))], 12, 32)
    assert {tuple(picture.batch for picture in pictures) for pictures in run.pictures.values()} == {(4, 8)}


def test_one_run_and_one_of_another_version(folders, tmp_path, capsys):
    out = tmp_path / "one.html"
    compare.main([str(folders[0]), "--out", str(out)])
    one = Page(out.read_text())
    assert one.texts("h1") == ["Run first"]
    assert {"Modellatent_diffusion", "Enginecomposer"} <= set(one.texts("tr"))
    older = made_run(tmp_path / "older", "older", checkpoints__a_key_of_another_version=1)
    compare.main([str(folders[0]), str(older), "--out", str(out)])
    assert "checkpoints" in Page(out.read_text()).texts("code")
    assert capsys.readouterr().err == ""


def test_a_picture_that_the_disk_does_not_give_is_not_to_be_deleted(folders, capsys, monkeypatch):
    monkeypatch.setattr(pictures.Image, "open", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(SystemExit):
        compare.main([str(folder) for folder in folders])
    assert re.fullmatch(r"error: \S+\.png: Input/output error; look at the disk .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("missing", "not a run, it has no config.yaml"),
        ("twice", "given twice"),
        ("kind", "runs of different kinds: "),
        ("silent", "train with the logger tensorboard"),
        ("yaml", "not readable as YAML"),
        ("empty", "other/config.yaml: names no model, so it is not the one that a run wrote"),
        ("picture", "not readable as a picture"),
        ("grids", "--grids: 0; give 1 or more"),
        ("folder", "is a folder; give the name of a file"),
        ("locked", "x.html: nothing can be written into /"),
    ],
)
def test_bad_input_in_one_line(case, said, folders, tmp_path, capsys, monkeypatch):
    other, options = tmp_path / "other", []
    if case == "twice":
        other = folders[0]
    elif case == "grids":
        options = ["--grids", "0"]
    elif case == "folder":
        other = folders[1]
        options = ["--out", str(tmp_path)]
    elif case == "locked":
        other = folders[1]
        monkeypatch.setattr("os.access", lambda folder, mode: folder != tmp_path)  # of another user
    elif case != "missing":
        made_run(other, base="openmoji_dvae" if case == "kind" else "openmoji_diffusion")
    if case == "silent":
        shutil.rmtree(other / "tensorboard")
    if case == "yaml":
        (other / "config.yaml").write_text("a: [")
    if case == "empty":
        (other / "config.yaml").write_text("{}")
    if case == "picture":
        (other / "samples" / "ba0000004.png").write_bytes(b"\x89PNG")
    with pytest.raises(SystemExit) as end:
        compare.main([str(folders[0]), str(other), "--out", str(tmp_path / "x.html"), *options])
    found = capsys.readouterr().err
    assert end.value.code == 2 and found.count("\n") == 1 and said in found
    assert not (tmp_path / "x.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)")
def test_a_browser_runs_the_script_of_the_page_alone(written, tmp_path):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*command, written.as_uri()], capture_output=True, text=True, timeout=120)
    dom = Page(done.stdout)
    assert dom.texts("title")[0].startswith("Comparison of first")  # and not what the labels would make of it
    (slider,) = (a for a in dom.all("div") if a.get("id") == "slider")
    assert "hidden" not in slider and dom.texts("output") == ["8 batches"]
    (moment,) = (a for a in dom.all("input") if a.get("id") == "moment")
    assert moment["max"] == "2" and moment["aria-valuetext"] == "8 batches"


def test_the_script_is_that_of_the_repository(page):
    assert page.texts("script") == [(ROOT / "recipes" / "comparison" / "page.js").read_text()]
