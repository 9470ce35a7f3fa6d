"""Text files as a source: whole files and lines, in the order of names; what is broken is named."""

import json

import pytest

from data.sources import texts
from data.sources.base import Rejected, Sample
from data.sources.texts import TextSource


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "b.md").write_text("second\n")
    (tmp_path / "in" / "a.txt").write_text("third")
    lines = [json.dumps({"text": "first"}), "", "{", json.dumps({"body": "x"}), json.dumps({"text": "again"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_texts_in_order(folder):
    source = TextSource(files=["**/*.txt", "*.md", "*.jsonl"])
    (shard,) = source.shards()
    found = list(source.read(shard))
    assert [one.caption for one in found if isinstance(one, Sample)] == ["first", "again", "second\n", "third"]
    rejected = [(one.key, one.reason) for one in found if isinstance(one, Rejected)]
    assert rejected == [("a.jsonl:3", "broken_metadata"), ("a.jsonl:4", "missing_caption")]
    assert TextSource(files=["in/a.txt", "b.md", "a.jsonl"]).shards() == [shard]  # another way to name the same files


def test_some_are_left_out(folder):
    source = TextSource(files=["*.md", "in/*"], exclude=["b.*"])
    assert [one.key for shard in source.shards() for one in source.read(shard)] == ["in/a.txt"]
    with pytest.raises(ValueError, match="exclude leaves out all of them"):
        TextSource(files=["*.md"], exclude=["*"])
    with pytest.raises(ValueError, match="source.files: empty; give at least one path"):
        TextSource(files=[])
    with pytest.raises(FileNotFoundError, match=r"source.files: no file \*.rst"):
        TextSource(files=["*.md", "*.rst"])


@pytest.mark.parametrize("excluded", ["./b.md", "in/../b.md", "{folder}/b.md", "**/b.md"])
@pytest.mark.parametrize("files", [["*.md", "in/*"], ["./*.md", "in/*"], ["b.md", "./b.md", "in/a.txt"]])
def test_a_path_may_be_written_in_several_ways(folder, files, excluded):
    source = TextSource(files=files, exclude=[excluded.format(folder=folder)])
    assert list(source.parts.values()) == [["in/a.txt"]]
    named_twice = TextSource(files=["b.md", f"{folder}/b.md"])
    assert list(named_twice.parts.values()) == [["b.md"]]


def test_each_file_is_read_once_although_links_lead_to_it_too(folder):
    (folder / "in" / "deep").mkdir()
    (folder / "in" / "deep" / "up").symlink_to(folder)  # ** follows it, as often as the system does
    (folder / "in" / "copy.md").symlink_to(folder / "b.md")
    source = TextSource(files=["**/*.md", "**/*.txt", "in/*.md"])
    assert list(source.parts.values()) == [["b.md", "in/a.txt"]]
    source = TextSource(files=["**/*.md", "**/*.txt"], exclude=["in/copy.md"])
    assert list(source.parts.values()) == [["in/a.txt"]]


def test_what_leaves_nothing_out_is_an_error(folder):
    with pytest.raises(FileNotFoundError, match=r"source.exclude: no file c\*"):
        TextSource(files=["*.md"], exclude=["c*"])
    (folder / "in" / "c.md").write_text("deeper")
    source = TextSource(files=["**/*.md"], exclude=["*.md"])  # * stands for no folder, as in `files`
    assert list(source.parts.values()) == [["in/c.md"]]


def test_names_with_brackets(folder):
    (folder / "b[1].md").write_text("another")
    assert list(TextSource(files=["b[1].md"]).parts.values()) == [["b[1].md"]]
    assert list(TextSource(files=["*.md"], exclude=["b[1].md"]).parts.values()) == [["b.md"]]


def test_files_are_joined_to_shards(folder):
    (folder / "big.txt").write_text("word " * (1 << 18))  # more than a megabyte
    source = TextSource(files=["*.jsonl", "big.txt", "in/a.txt"], shard_mb=1)
    assert [names for names in source.parts.values()] == [["a.jsonl", "big.txt"], ["in/a.txt"]]
    with pytest.raises(ValueError, match="it has 2"):
        list(source.read("other"))
    (folder / "in" / "a.txt").write_text("another one")  # of another size is another shard
    again = TextSource(files=["*.jsonl", "big.txt", "in/a.txt"], shard_mb=1).shards()
    assert [old == new for old, new in zip(source.shards(), again, strict=True)] == [True, False]


def test_bytes_that_are_no_text(folder):
    (folder / "c.md").write_bytes(b"\xff\xfe")
    source = TextSource(files=["c.md"])
    (found,) = source.read(source.shards()[0])
    assert (found.key, found.reason) == ("c.md", "caption_not_utf8")


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("length", [40, 41, 80, 81, 1000])
def test_lines_that_are_too_long_are_rejected_and_the_next_is_read(folder, monkeypatch, length, end):
    monkeypatch.setattr(texts, "MAX_FILE_BYTES", 40)
    line = json.dumps({"text": "x" * (length - 13)}) + "\n"
    lines = [line[:-1] + end] if end == "" else [line, json.dumps({"text": "next"}) + "\n"]
    (folder / "long.jsonl").write_text("".join(lines))
    source = TextSource(files=["long.jsonl"])
    found = list(source.read(source.shards()[0]))
    first = "x" * (length - 13)
    size = length - (end == "")
    kept = [one.caption if isinstance(one, Sample) else one.reason for one in found]
    assert kept == [first if size <= 40 else "too_large_file", "next"][: len(lines)]
    assert [one.key for one in found] == ["long.jsonl:1", "long.jsonl:2"][: len(lines)]
