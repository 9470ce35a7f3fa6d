"""data/sources/tars.py: brace ranges, remote tars, and everything that can be wrong in a tar."""

import errno
import gzip
import http.server
import io
import os
import shutil
import tarfile
import threading
import time
import tracemalloc
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.remote import downloads
from data.sources import tars
from data.sources.base import Rejected, Sample
from data.sources.tars import TarSource, expand
from data.system.errors import Outage
from tests.data.sources.test_sources import ROWS, layout, picture, read, reasons, write_tar


def test_the_webdataset_library_and_this_one_read_each_other(tmp_path):
    import webdataset as wds

    with wds.TarWriter(str(tmp_path / "w.tar")) as out:
        for key, image, caption in ROWS:
            out.write({"__key__": key, "png": image, "txt": caption})
    samples = read(TarSource(urls=str(tmp_path / "w.tar")))
    assert [(row.key, row.image, row.caption) for row in samples] == ROWS
    write_tar(tmp_path / "ours.tar", layout())
    theirs = wds.WebDataset(str(tmp_path / "ours.tar"), shardshuffle=False)
    assert [(row["__key__"], row["png"], row["txt"].decode()) for row in theirs] == ROWS


def test_a_tar_that_the_disk_does_not_give_is_named(tmp_path, monkeypatch):
    """Errors of a file that is open name none."""
    write_tar(tmp_path / "a.tar", [("a.png", picture(1)), ("a.txt", b"caption")])
    monkeypatch.setattr(tarfile, "open", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output") as error:
        read(TarSource(urls=f"{tmp_path}/a.tar"))
    assert error.value.filename == f"{tmp_path}/a.tar"


def test_tar_members_without_partner(tmp_path):
    image, text = picture(1), b"caption"
    members = [
        ("README", b"about"),
        ("a.png", image),
        ("b.txt", text),
        ("c.png", image),
        ("c.txt", text),
        ("d.png", image),
        ("d.jpg", image),
        ("d.txt", text),
        ("e.png", image),
        ("e.txt", b"\xff\xfe caption"),
        ("f.png", image),
        ("f.txt", text),
        ("f.json", b"{"),
        ("g.png", image),
        ("g.txt", text),
        ("g.json", b"[1]"),
        ("c.png", picture(2)),
        ("c.txt", b"another"),
        ("h.PNG", image),
        ("h.txt", text),
        ("h.txt", text),
        ("__meta__/x.txt", text),
        ("./dir/i.png", image),
        ("./dir/i.txt", text),
    ]
    rows = read(TarSource(urls=str(write_tar(tmp_path / "x.tar", members))))
    assert [(row.key, getattr(row, "reason", "")) for row in rows] == [
        ("README", "unknown_member"),
        ("a", "missing_caption"),
        ("b", "missing_image"),
        ("c", ""),
        ("d", "duplicate_image"),
        ("e", "caption_not_utf8"),
        ("f", ""),  # its JSON is not read
        ("g", ""),
        ("c", "duplicate_key"),
        ("h", ""),
        ("h", "duplicate_key"),
        ("dir/i", ""),
    ]
    assert rows[3].image == image


def test_tar_links_are_not_followed(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        text = tarfile.TarInfo("a.txt")
        text.size = 3
        tar.addfile(text, io.BytesIO(b"abc"))
    found = [(row.key, row.reason) for row in read(TarSource(urls=str(tmp_path / "x.tar")))]
    assert found == [("a.png", "unknown_member"), ("a", "missing_image")]


def test_tar_caption_out_of_json(tmp_path):
    image = picture(4)
    broken = {"d": b"{", "e": b"[1]", "f": b"[" * 200_000}
    members = [
        ("a.png", picture(1)),
        ("a.json", b'{"long": "told at length"}'),
        ("b.png", picture(2)),
        ("b.json", b"{}"),
        ("c.png", picture(3)),
        ("c.txt", b"in another file"),
    ]
    members += [member for key, text in broken.items() for member in ((f"{key}.png", image), (f"{key}.json", text))]
    source = TarSource(urls=str(write_tar(tmp_path / "x.tar", members)), caption="json:long")
    assert read(source)[0].caption == "told at length"
    missing = {"b": "missing_caption", "c": "missing_caption"}
    assert reasons(source) == missing | dict.fromkeys(broken, "broken_metadata")
    texts = TarSource(urls=str(tmp_path / "x.tar"))  # `caption` was forgotten
    told = "no {} (the source's `caption`), but {}".format
    details = [row.detail for found in (source, texts) for row in read(found) if isinstance(row, Rejected)]
    assert details[1] == told("json:long", "members png, txt") and details[-1] == told("txt", "members png, json")


@pytest.mark.parametrize(("value", "kind"), [("null", "null"), ('["a", "b"]', "a JSON list"), ("5", "a JSON int")])
def test_a_caption_out_of_json_that_is_not_text_is_named(value, kind, tmp_path):
    path = write_tar(tmp_path / "x.tar", [("a.png", picture(1)), ("a.json", f'{{"long": {value}}}'.encode())])
    (row,) = read(TarSource(urls=str(path), caption="json:long"))
    assert row.reason == "missing_caption"
    assert row.detail == f"json:long (the source's `caption`) is {kind}, not text"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_compressed_and_truncated_tars(mode, tmp_path):
    path = write_tar(tmp_path / "x.tar", layout(), mode)
    assert [row.key for row in read(TarSource(urls=str(path)))] == [row[0] for row in ROWS]
    whole = path.read_bytes()
    for part in (0.3, 0.6):
        path.write_bytes(whole[: int(len(whole) * part)])
        rows = read(TarSource(urls=str(path)))
        good = [row for row in rows if isinstance(row, Sample)]
        assert [(row.key, row.image, row.caption) for row in good] == ROWS[: len(good)]
        assert [row.reason for row in rows if row.key == "x.tar"] == ["broken_shard"]


def test_every_truncation_of_a_tar_is_seen(tmp_path):
    """The library stops without a word where a header is cut off; here each cut is reported."""
    whole = write_tar(tmp_path / "x.tar", layout(ROWS[:2])).read_bytes()
    content = len(whole.rstrip(b"\0"))
    path = tmp_path / "cut.tar"
    source = None
    for cut in range(0, content, 509):
        path.write_bytes(whole[:cut])
        source = source or TarSource(urls=str(path))
        assert [row.key for row in read(source) if getattr(row, "reason", "") == "broken_shard"] == ["cut.tar"]
    damaged = bytearray(whole)
    damaged[3072:3584] = b"x" * 512  # a header in the middle
    path.write_bytes(damaged)
    assert "cut.tar" in reasons(source)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_data_after_the_end_of_an_archive_is_reported(mode, tmp_path):
    parts = [write_tar(tmp_path / str(len(rows)), layout(rows), mode).read_bytes() for rows in (ROWS[:2], ROWS[2:])]
    (tmp_path / "x.tar").write_bytes(b"".join(parts))
    *samples, broken = read(TarSource(urls=str(tmp_path / "x.tar")))
    assert [row.key for row in samples] == ["p00", "p01"] and broken.reason == "broken_shard"
    assert broken.detail.startswith("data after the end-of-archive mark at byte ")


def test_a_hole_in_a_tar_is_reported(tmp_path):
    path = write_tar(tmp_path / "x.tar", layout())
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        hole = archive.getmember("p02.txt").offset
    path.write_bytes(whole[:hole] + bytes(512) + whole[hole + 512 :])
    assert reasons(TarSource(urls=str(path))) == {"p02": "missing_caption", "x.tar": "broken_shard"}
    path.write_bytes(whole + bytes(3 << 20))  # only zeros follow
    assert not reasons(TarSource(urls=str(path)))


def test_tar_that_is_none(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"<html>not found</html>" * 99)
    assert reasons(TarSource(urls=str(tmp_path / "x.tar"))) == {"x.tar": "broken_shard"}


def test_a_member_of_a_wild_size_ends_the_shard(tmp_path):
    write_tar(tmp_path / "0.tar", layout())
    data = bytearray((tmp_path / "0.tar").read_bytes())
    data[124] = 0x80  # the digits of the first member's size are then its bytes
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (tmp_path / "0.tar").write_bytes(data)
    (row,) = read(TarSource(urls=str(tmp_path / "0.tar")))
    assert row.reason == "broken_shard" and "larger than any file" in row.detail


def test_huge_members_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "MAX_FILE_BYTES", 1000)
    path = write_tar(tmp_path / "x.tar", [("a.png", bytes(1001)), ("a.txt", b"big"), *layout(ROWS[:1])])
    assert reasons(TarSource(urls=str(path))) == {"a": "too_large_file"}


def test_members_that_no_sample_is_made_of_take_no_memory(tmp_path):
    path, size = tmp_path / "x.tar.gz", 10_000_000
    with tarfile.open(path, "w:gz") as archive:
        for number in range(10):
            info = tarfile.TarInfo(f"a.x{number}")
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(size)))
    source = TarSource(urls=str(path))
    tracemalloc.start()
    try:
        assert reasons(source) == {"a": "missing_image"}
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("url", ["pipe:cat x.tar", "-", "ssh://host/x.tar", "PIPE:ls", "ais://b/x.tar", "|ls"])
def test_commands_are_refused(url):
    with pytest.raises((ValueError, FileNotFoundError), match="source.urls"):
        TarSource(urls=url)


@pytest.mark.parametrize("url", ["http://host/my tars/{0..1}.tar?signature=x y", "https://host/my%20tars/ü.tar"])
def test_web_addresses_that_cannot_be_asked_for_are_refused(url):
    with pytest.raises(ValueError, match=r"write them with %, such as https?://host/my%20tars/(0|%C3%BC).tar$"):
        TarSource(urls=url)
    assert len(TarSource(urls="http://bücher.example/my%20tars/{0..1}.tar").shards()) == 2


def test_wildcards_in_stores_are_refused():
    """The store was asked for an object of this name, for a minute and after the encoders had been loaded."""
    with pytest.raises(ValueError, match=r"s3://bucket/tars/\*.tar: a \* stands for names of local files only; name"):
        TarSource(urls="s3://bucket/tars/*.tar")
    assert len(TarSource(urls="http://me:a*b@host/{0..1}.tar?signature=x*y").shards()) == 2


def test_missing_tars_are_named(tmp_path):
    write_tar(tmp_path / "0.tar", layout())
    with pytest.raises(FileNotFoundError, match="1.tar"):
        TarSource(urls=[str(tmp_path / "{0..2}.tar")])
    with pytest.raises(FileNotFoundError, match=r"none-\*"):
        TarSource(urls=str(tmp_path / "none-*.tar"))
    with pytest.raises(ValueError, match="twice"):
        TarSource(urls=[str(tmp_path / "0.tar"), str(tmp_path / "*.tar")])
    with pytest.raises(ValueError, match="empty"):
        TarSource(urls=[])
    with pytest.raises(ValueError, match=r"is a folder: give its tars, such as /.*/\*.tar"):
        TarSource(urls=str(tmp_path))
    source = TarSource(urls=str(tmp_path / "*.tar"))
    (tmp_path / "0.tar").unlink()
    with pytest.raises(FileNotFoundError, match="0.tar"):
        read(source)


def test_a_tar_that_a_link_leads_to_again_is_refused(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", layout())
    (tmp_path / "up").symlink_to(tmp_path)  # which ** follows as often as the system does
    with pytest.raises(ValueError, match=r"names (.*)/0.tar twice, also as \1/(up/)+0.tar: list each tar once$"):
        TarSource(urls=f"{tmp_path}/**/*.tar")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"names 0.tar twice, also as ./0.tar: list"):
        TarSource(urls=["0.tar", "./0.tar"])


@given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 6))
def test_brace_ranges(first, count, width):
    last = f"{first + count:0{width}d}"
    urls = list(expand(f"https://host/a/{{{first:0{width}d}..{last}}}.tar"))
    assert [int(url[len("https://host/a/") : -4]) for url in urls] == list(range(first, first + count + 1))
    assert urls[-1] == f"https://host/a/{last}.tar"


def test_brace_lists_and_too_large_ranges():
    assert list(expand("s3://b/{x,y}/{0..1}.tar")) == [f"s3://b/{a}/{b}.tar" for a in "xy" for b in "01"]
    with pytest.raises(ValueError, match="smaller range"):
        next(expand("gs://b/{0..99999999999}.tar"))
    with pytest.raises(ValueError, match="smaller range"):
        next(expand("gs://b/{0..9999}/{99999..00000..2}.tar"))
    with pytest.raises(ValueError, match="source.urls: {0..9.tar has one brace of two"):
        next(expand("{0..9.tar"))


def test_a_list_of_tars_is_looked_up_as_a_whole(tmp_path, monkeypatch):
    """For each of its addresses a thread was started, for 100,000 of them in half a minute."""
    for name in "ab0123":
        write_tar(tmp_path / f"{name}.tar", [])
    looked_up = Mock(wraps=tars.side_by_side)
    monkeypatch.setattr(tars, "side_by_side", looked_up)
    source = TarSource(urls=[f"{tmp_path}/{name}.tar" for name in ("b", "{2..3}", "[01]", "a")])
    assert [os.path.basename(url) for url in source.urls.values()] == [f"{name}.tar" for name in "b2301a"]
    assert looked_up.call_count == 2  # the names, and the sizes


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`; the first answer to each path breaks off half-way."""

    files: dict[str, bytes] = {}
    asked: list[str] = []

    def do_GET(self):
        data = self.files.get(self.path)
        if data is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        first = self.path not in self.asked
        self.asked.append(self.path)
        self.wfile.write(data[: len(data) // 2] if first else data)

    def log_message(self, *args):
        pass


def test_remote_tars_are_fetched_again_when_the_connection_breaks(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    Server.files = {"/0.tar": write_tar(tmp_path / "0.tar", layout()).read_bytes()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        source = TarSource(urls=f"{address}/{{0..1}}.tar")
        rows = list(source.read(source.shards()[0]))
        assert [(row.key, row.image, row.caption) for row in rows] == ROWS
        assert Server.asked == ["/0.tar", "/0.tar"]
        with pytest.raises(FileNotFoundError, match=r"1\.tar \(HTTP 404\)"):
            list(source.read(source.shards()[1]))
    finally:
        server.shutdown()
        server.server_close()
    pauses = []
    monkeypatch.setattr(downloads.time, "sleep", pauses.append)
    with pytest.raises(Outage, match="0.tar"):
        list(source.read(source.shards()[0]))
    assert pauses == sorted(pauses) and sum(pauses) >= 60  # a server that restarts is back by then


class WithoutLength(Server):
    """Serves half of each file, and says neither how long it is nor where it ends."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.files[self.path][: len(self.files[self.path]) // 2])


def test_a_tar_that_may_have_been_cut_on_its_way_is_said_to(tmp_path, monkeypatch):
    """A server that gives no length cannot be asked again: its answer looks whole."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(WithoutLength, "files", {"/0.tar": write_tar(tmp_path / "0.tar", layout()).read_bytes()})
    with http.server.HTTPServer(("127.0.0.1", 0), WithoutLength) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        *_, last = read(TarSource(urls=f"http://127.0.0.1:{server.server_port}/0.tar"))
    assert last.reason == "broken_shard" and last.detail.endswith(
        "; the server gives no length, so the download may have been cut"
    )
    (tmp_path / "0.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:2000])
    *_, last = read(TarSource(urls=str(tmp_path / "0.tar")))
    assert last.reason == "broken_shard" and last.detail.endswith(")")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("https://me:secret@host:80/a/0.tar?signature=secret", "https://host:80/a/0.tar"),
        ("https://host/0.tar?token=secret@x", "https://host/0.tar"),
        ("postgresql://me:secret@host/runs", "postgresql://host/runs"),
        ("s3://bucket/a@b/0.tar", "s3://bucket/a@b/0.tar"),
        ("a?b/0.tar", "a?b/0.tar"),
    ],
)
def test_addresses_are_shown_without_secrets(address, text):
    assert downloads.shown(address) == text


def test_a_signature_is_in_no_message_and_no_list_of_rejected_samples(tmp_path, monkeypatch, caplog):
    def come(address, path, timeout, attempts=None, downloader=None):
        path.write_bytes(write_tar(tmp_path / "whole.tar", layout()).read_bytes()[:700])

    def fail(*arguments, **options):
        raise OSError("the server is gone")

    source = TarSource(urls="https://me:secret@host/0.tar?signature=secret")
    monkeypatch.setattr(tars, "fetch", come)
    assert [row.key for row in read(source) if row.reason == "broken_shard"] == ["0.tar"]
    monkeypatch.undo()
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(downloads.urllib.request, "urlopen", fail)
    with pytest.raises(Outage, match="cannot fetch https://host/0.tar: the server is gone") as raised:
        read(source)
    assert "secret" not in f"{raised.value}{caplog.text}"


@pytest.mark.parametrize(
    "answer",
    [b"<!DOCTYPE html><title>Log in</title>" * 40, b"", gzip.compress(b"<html>" * 400)],
    ids=["page", "empty", "compressed"],
)
def test_an_answer_that_is_no_tar_is_not_a_damaged_tar(answer, monkeypatch):
    """A damaged tar counts as done, and the job would never ask for it again."""
    monkeypatch.setattr(tars, "fetch", lambda address, path, timeout: path.write_bytes(answer))
    text = rf"cannot fetch https://host/0.tar: what came is not a tar \({len(answer):,} bytes, .*asks for a login"
    with pytest.raises(ValueError, match=text):
        read(TarSource(urls="https://host/0.tar"))


def test_buckets_go_through_the_streaming_library(tmp_path, monkeypatch):
    from streaming.base.storage import CloudDownloader

    asked = []

    class Downloader:
        def download(self, remote, local, timeout):
            asked.append(remote)
            if len(asked) == 1:
                raise TimeoutError("no answer")
            if "gone" in remote:
                raise FileNotFoundError(remote)
            if "large" in remote:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            shutil.copy(tmp_path / "0.tar", local)

        def clean_up(self):
            pass

    write_tar(tmp_path / "0.tar", layout())
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(CloudDownloader, "get", lambda address: Downloader())
    source = TarSource(urls=["s3://bucket/0.tar", "gs://bucket/gone.tar", "s3://bucket/large.tar"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    for name, written in {"at_work": time.time(), "killed": 0}.items():  # each in an old folder
        folder = tmp_path / "scratch" / f"precompose-tar-{name}"
        folder.mkdir(parents=True)
        for path, when in (folder / "shard.tar.part", written), (folder, 0):
            path.touch()
            os.utime(path, (when, when))
    rows = source.read(source.shards()[0])
    assert next(rows).key == ROWS[0][0]
    # A process that is killed now leaves nothing; one that was killed has left nothing.
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["precompose-tar-at_work"]
    assert [row.key for row in rows] == [row[0] for row in ROWS[1:]]
    assert asked == ["s3://bucket/0.tar"] * 2
    with pytest.raises(FileNotFoundError, match="gs://bucket/gone.tar"):
        list(source.read(source.shards()[1]))
    with pytest.raises(ValueError, match=f"large.tar: .*No space left on device; make room in {tmp_path}/") as full:
        list(source.read(source.shards()[2]))
    assert not isinstance(full.value, Outage)  # asking the server again would not help


def test_gzip_is_read_without_its_suffix(tmp_path):
    write_tar(tmp_path / "x", layout())
    (tmp_path / "y.tar").write_bytes(gzip.compress((tmp_path / "x").read_bytes()))
    assert len(read(TarSource(urls=str(tmp_path / "y.tar")))) == len(ROWS)


def test_a_tar_of_another_size_is_another_shard(tmp_path):
    path = write_tar(tmp_path / "a.tar", layout())
    before = TarSource(urls=str(path)).shards()
    assert TarSource(urls=str(path)).shards() == before
    write_tar(path, [*layout(), *((f"more{n}.txt", b"x" * 4096) for n in range(8))])
    assert TarSource(urls=str(path)).shards() != before
