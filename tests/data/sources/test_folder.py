"""Folders of images: captions beside them or in a table, oddities, errors, and what makes another shard."""

import json
import os
import shutil
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sources.base import Rejected, shard_id
from data.sources.folder import FolderSource, _divided
from tests.data.sources.test_sources import picture, read
from tests.fuzzing import few


@few
@given(st.lists(st.text("ab.TX", min_size=1, max_size=6).filter(lambda part: part[0] != "."), min_size=1, max_size=3))
def test_suffixes_are_those_of_paths(parts):
    path = PurePosixPath("/".join(parts))
    assert _divided(str(path)) == (str(path.with_suffix("")), path.suffix[1:].lower())


def test_folder_oddities(tmp_path):
    for name, data in {
        "a.png": picture(1),
        "b.txt": b"no picture",
        "sub/c.JPG": picture(2),
        "sub/c.txt": "\ufeffwith a mark".encode(),
        "d.png": picture(3),
        "d.webp": picture(4),
        "d.txt": b"two pictures",
        "e.png": picture(5),
        "e.txt": b"\xff",
        ".hidden.png": picture(6),
        "notes.md": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "f.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "round").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "g.png")  # to open it would wait for a writer
    source = FolderSource(path=str(tmp_path))
    rows = read(source)
    assert {row.key: getattr(row, "reason", getattr(row, "caption", "")) for row in rows} == {
        "a": "missing_caption",
        "b": "missing_image",
        "sub/c": "with a mark",
        "d.png": "two pictures",
        "d.webp": "two pictures",
        "e": "caption_not_utf8",
        "f": "missing_image",
        "g": "missing_image",
    }
    assert len(rows) == 8
    (tmp_path / "new.png").write_bytes(picture(1))
    assert FolderSource(path=str(tmp_path)).shards() != source.shards()  # an encoded shard is not taken for it


@pytest.mark.parametrize("lost", ["folder", "content", "texts"])
def test_images_of_a_folder_that_is_not_mounted_any_more_are_not_rejected(lost, tmp_path):
    """The shard would count as done, without its images."""
    root = tmp_path / "pictures"
    for number in range(3):
        (root / "images").mkdir(parents=True, exist_ok=True)
        (root / "images" / f"{number}.png").write_bytes(b"an image")
        (root / "images" / f"{number}.txt").write_text("a caption")
    source = FolderSource(path=str(root))
    samples = source.read(*source.shards())
    assert next(samples).key == "images/0"
    (root / "images" / "1.png").unlink()  # one that somebody removed
    assert next(samples).reason == "missing_image"
    if lost == "texts":
        read = Path.is_file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "is_file", lambda path: shutil.rmtree(path.parent, ignore_errors=True) or read(path))
            with pytest.raises(FileNotFoundError):
                next(samples)
        return
    shutil.rmtree(root / "images")
    if lost == "content":
        (root / "images").mkdir()
    with pytest.raises(OSError, match="images"):
        next(samples)


def test_a_folder_without_texts_names_the_table_that_is_there(tmp_path):
    """Otherwise every image would be rejected, one by one."""
    (tmp_path / "a.png").write_bytes(picture(1))
    (tmp_path / "note.txt").write_text("of no image")
    message = "has a .txt file of its name beside it; write these, or give the name of a .jsonl or .csv file"
    with pytest.raises(ValueError, match=f"{message}$"):
        FolderSource(path=str(tmp_path))
    (tmp_path / "captions.csv").write_text("file,caption\na.png,red\n")
    with pytest.raises(ValueError, match=f"{message}, such as captions.csv, which is there$"):
        FolderSource(path=str(tmp_path))
    FolderSource(path=str(tmp_path), captions="captions.csv")
    (tmp_path / "a.txt").write_text("red")
    FolderSource(path=str(tmp_path))


def test_suffixes_of_a_folder_are_taken_in_any_case(tmp_path):
    for name, text in (("a.png", "a.TXT"), ("b.PNG", "b.txt"), ("c.Jpg", "c.Txt"), ("d.JFIF", "d.txt")):
        (tmp_path / name).write_bytes(picture(1))
        (tmp_path / text).write_text(text)
    assert [row.caption for row in read(FolderSource(path=str(tmp_path)))] == ["a.TXT", "b.txt", "c.Txt", "d.txt"]
    (tmp_path / "a.txt").write_text("the usual name first")
    assert read(FolderSource(path=str(tmp_path)))[0].caption == "the usual name first"


def test_folder_table_oddities(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(1))
    (tmp_path / "b.png").write_bytes(picture(2))
    (tmp_path / "c.png").write_bytes(picture(3))
    lines = ["a.png,one", "./a.png,two", "../secret.png,three", "gone.png,four", "c.png"]
    (tmp_path / "t.csv").write_text("file_name,text\n" + "\n".join(lines), "utf-8")
    rows = read(FolderSource(path=str(tmp_path), captions="t.csv"))
    assert sorted((row.key, getattr(row, "reason", getattr(row, "caption", ""))) for row in rows) == [
        ("../secret.png", "missing_image"),
        ("a", "one"),
        ("a.png", "duplicate_key"),
        ("b", "missing_caption"),
        ("c", ""),
        ("gone.png", "missing_image"),
    ]


@pytest.mark.parametrize("table", ["file_name,text\na.png,one\n", '{"file_name": "a.png", "text": "one"}\n'])
def test_a_table_may_begin_with_a_byte_order_mark(tmp_path, table):
    """As spreadsheet programs write it."""
    (tmp_path / "a.png").write_bytes(picture(1))
    name = "t.csv" if table.startswith("file") else "t.jsonl"
    (tmp_path / name).write_text(table, "utf-8-sig")
    assert [row.caption for row in read(FolderSource(path=str(tmp_path), captions=name))] == ["one"]


def test_rows_of_a_table_without_a_name_are_listed_by_their_line(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(1))
    names = ("a.png", None, "", "gone.png")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"file_name": name, "text": "x"}) + "\n" for name in names))
    found = [row for row in read(FolderSource(path=str(tmp_path), captions="t.jsonl")) if isinstance(row, Rejected)]
    assert sorted(row.key for row in found) == ["gone.png", "t.jsonl:2", "t.jsonl:3"]
    assert {row.reason for row in found} == {"missing_image"}


def test_other_captions_in_a_table_are_another_shard(tmp_path):
    def shards(*rows, captions="t.csv"):
        (tmp_path / "t.csv").write_text("\n".join(["file,text,note", *rows]), "utf-8")
        return FolderSource(path=str(tmp_path), captions=captions, shard_size=1).shards()

    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(picture(1))
        (tmp_path / f"{name}.txt").write_text("a text")
    one = shards("a.png,one,n", "b.png,two,n")
    assert shards("b.png,two,other", "a.png,one,other") == one  # the order, and what is not used
    edited = shards("a.png,three,n", "b.png,two,n")
    assert edited[0] != one[0] and edited[1] == one[1]
    assert len({shards("a.png,one,", row)[1] for row in ("b.png,,", "b.png,None,", "gone.png,two,")}) == 3
    assert shards(captions="txt") == [shard_id("00000", "a.png"), shard_id("00001", "b.png")]  # as in earlier versions


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"picture,text\na.png,one\n", "line 2: no column file_name or file"),
        ("t.csv", b"file,text\na.png,one, two\n", "line 2: more cells"),
        ("t.csv", b"file;text\na.png;one, two\n", "line 1: the cells are separated by ';': separate them by commas"),
        ("t.csv", b"file,text,id,text\na.png,one,1,two\n", "several columns are named text: rename all but one"),
        ("t.csv", b"file\ttext\na.png\tone\n", r"line 1: the cells are separated by '\\t'"),
        ("t.csv", b"file,text\na.png,\xff\n", "not UTF-8"),
        ("t.csv", b'file,text\na.png,"' + b"a\n" * 99_999, "line 2: field larger .*: close the quote"),
        ("t.csv", b'file,text\na.png,"a\nb.png,b\n', "line 2: unexpected end of data: close the quote"),
        ("t.csv", b'file,text\na.png,a\nb.png,"b\nc.png,"c"\n', "line 3: ',' expected after '\"': close the quote"),
        ("t.csv", b'file,text\na.png,"a" \n', "line 2: ',' expected after '\"': close .*, right before the comma or"),
        ("t.csv", b'file,text\na.png,a\n"b.png,' + b"b" * 200_000, "line 3: field larger .*: close the quote"),
        ("t.jsonl", b'{"file": "a.png", "caption": "x"}\n{', "line 2: not JSON"),
        ("t.jsonl", b'{"file": "a.png", "caption": 3}\n', "line 1: caption is a int"),
        ("t.jsonl", b"[]\n", "line 1: give one JSON object"),
        ("t.xlsx", b"", "not read"),
        ("t.csv", b"file,text\nin/a.png,one\n", "names no image in .*: its first row names in/a.png, .* a.png"),
        ("t.jsonl", b"", "t.jsonl names no image in .*: it has no row"),
    ],
)
def test_folder_tables_that_are_wrong(name, content, message, tmp_path):
    (tmp_path / "a.png").write_bytes(picture(1))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        FolderSource(path=str(tmp_path), captions=name)
